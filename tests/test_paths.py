"""Paths of a configuration: one place fills in home folders and variables, for every key and every reader."""

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fa_rollout.config import ConfigError, from_dict, to_dict
from fa_rollout.config.keys import by_path
from fa_rollout.config.paths import PathError, expanded
from fa_rollout.config.sections import Config
from fa_rollout.verbs import configured

NAMES = ("path", "dir", "model", "tokenizer", "python", "replay")


def tree(**sections: dict[str, Any]) -> dict[str, Any]:
    smallest: dict[str, dict[str, Any]] = {
        "data": {"path": "prompts.jsonl"},
        "rollout": {"num_steps": 1, "groups_per_step": 2, "samples_per_group": 3},
        "reward": {"function": "task.reward"},
        "engine": {"model": "model"},
    }
    return {n: smallest.get(n, {}) | sections.get(n, {}) for n in smallest.keys() | sections.keys()}


def path_keys() -> list[str]:
    return [key.path for key in by_path().values() if "path" in key.words]


def test_every_key_that_names_a_place_is_a_path() -> None:
    by_name = {key.path for key in by_path().values() if key.name.endswith(NAMES) or "Folder" in key.doc}
    assert by_name - {"trainer.publish"} <= set(path_keys())


@pytest.mark.parametrize("key", path_keys())
def test_home_and_variables_are_filled_in_and_stay(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    section, name = key.split(".")

    def read(value: Any) -> Any:
        config = from_dict(tree(**{section: {name: value}}))
        assert from_dict(to_dict(config)) == config
        return getattr(getattr(config, section), name)

    if by_path()[key].words.startswith("a table"):
        assert read({"a": "~/x"}) == {"a": "/home/me/x"}
        return
    assert read("~/x") == "/home/me/x"
    assert read("$SCRATCH/${SCRATCH}/x~") == "/scratch/me//scratch/me/x~"
    assert read("cost$/a") == "cost$/a"


def test_a_variable_that_is_not_set_is_named_and_makes_no_folder() -> None:
    with pytest.raises(
        ConfigError, match=r"run.output_dir = '\$NOT_SET_HERE/out': .* NOT_SET_HERE is not set"
    ):
        from_dict(tree(run={"output_dir": "$NOT_SET_HERE/out"}))
    with pytest.raises(PathError, match="no home folder is known for 'nobody-of-that-name'"):
        expanded("data.path", "~nobody-of-that-name/x")


def test_options_of_commands_are_paths_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert configured.path("~/run") == Path("/home/me/run")
    with pytest.raises(argparse.ArgumentTypeError, match="NOT_SET_HERE is not set"):
        configured.path("$NOT_SET_HERE")


def test_the_configuration_is_whole_before_it_is_passed_on() -> None:
    assert msgspec.json.decode(msgspec.json.encode(to_dict(from_dict(tree()))), type=Config)
