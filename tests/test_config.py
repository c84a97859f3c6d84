"""The configuration: one definition, checked whole, with messages that name key, value and way out."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fa_rollout import config
from fa_rollout.config import ConfigError, from_dict, load, to_dict


def tree(**sections: dict[str, Any]) -> dict[str, Any]:
    smallest: dict[str, dict[str, Any]] = {
        "data": {"path": "prompts.jsonl"},
        "rollout": {"num_steps": 1, "groups_per_step": 2, "samples_per_group": 3},
        "reward": {"function": "task.reward"},
        "engine": {"model": "model"},
    }
    return {
        name: smallest.get(name, {}) | sections.get(name, {}) for name in smallest.keys() | sections.keys()
    }


@pytest.mark.parametrize(
    ("text", "number"),
    [("8GiB", 8 << 30), ("64 MiB", 64 << 20), ("0.5kb", 500), (1024, 1024), ("1024", 1024)],
)
def test_sizes(text: str | int, number: int) -> None:
    assert from_dict(tree(ring={"bytes": text})).ring.bytes == number


@pytest.mark.parametrize(
    ("text", "number"),
    [("30s", 30.0), ("5m", 300.0), ("250ms", 0.25), ("1.5h", 5400.0), (7, 7.0), (0.5, 0.5)],
)
def test_times(text: str | float, number: float) -> None:
    assert from_dict(tree(rollout={"group_timeout_s": text})).rollout.group_timeout_s == number


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"ring": {"bytes": "8 apples"}}, ["ring.bytes", "8 apples", "64MiB"]),
        ({"run": {"grace_s": "soon"}}, ["run.grace_s", "soon", "30s"]),
        ({"run": {"grace_s": -1}}, ["run.grace_s"]),
        ({"rollout": {"stalenes": 3}}, ["stalenes", "staleness", "[rollout]"]),
        ({"rollout": {"staleness": -1}}, ["rollout.staleness"]),
        ({"rollout": {"staleness_policy": "maybe"}}, ["staleness_policy"]),
        ({"sampling": {"top_p": 0.0}}, ["sampling.top_p"]),
        ({"rolout": {}}, ["rolout", "rollout", "top level"]),
        ({"engine": {"model": None}}, ["engine.urls", "engine.model"]),
    ],
)
def test_a_mistake_is_named_with_its_key_and_the_way_out(
    sections: dict[str, dict[str, Any]], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(tree(**sections))
    for word in words:
        assert word in str(caught.value)


def test_a_missing_key_is_named() -> None:
    incomplete = tree()
    del incomplete["reward"]["function"]
    with pytest.raises(ConfigError, match="function"):
        from_dict(incomplete)


def test_every_value_is_plain_and_comes_back_from_json() -> None:
    whole = from_dict(tree(ring={"bytes": "1MiB"}, rollout={"group_timeout_s": "5m"}))
    assert type(whole.ring.bytes) is int
    assert type(whole.run.grace_s) is float
    assert from_dict(json.loads(json.dumps(to_dict(whole)))) == whole


def test_a_file_that_is_no_toml_or_not_there_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("data = [")
    with pytest.raises(ConfigError, match="must be TOML"):
        load(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.toml")


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        from_dict(tree()).rollout.num_steps = 5  # type: ignore[misc]


def test_every_key_has_a_plain_type_or_a_section() -> None:
    for field in config.Config.__struct_fields__:
        assert field in to_dict(from_dict(tree()))


def test_the_reference_page_is_that_of_this_code() -> None:
    root = Path(__file__).parent.parent
    made = subprocess.run(
        [sys.executable, str(root / "scripts" / "config-reference")],
        capture_output=True,
        text=True,
        check=True,
    )
    page = (root / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert made.stdout == page, "make it again: scripts/config-reference > docs/configuration.md"


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"record": {"columns": [{"name": "rewards", "per": "token"}]}}, "none like those of every record"),
        ({"record": {"columns": [{"name": "cu_x", "per": "item"}]}}, "none like those of every record"),
        ({"record": {"columns": [{"name": "x", "per": "token"}] * 2}}, "each column once"),
        ({"record": {"columns": [{"name": "x", "per": "day"}]}}, "Invalid enum value 'day'"),
        ({"record": {"columns": [{"name": "x", "per": "token", "dtyp": "int8"}]}}, "dtyp"),
        ({"evaluation": {"sampling": {"temprature": 0.0}}}, "must be those of .sampling.*temprature"),
        ({"evaluation": {"sampling": {"top_p": 2.0}}}, "top_p"),
    ],
)
def test_a_column_or_an_evaluation_that_cannot_be_is_refused_at_the_start(
    section: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        from_dict(tree(**section))
