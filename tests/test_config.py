"""The configuration: one definition, checked whole, with messages that name key, value and way out."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fa_rollout import config
from fa_rollout.config import ConfigError, from_dict, load, to_dict
from fa_rollout.config.keys import by_path


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
        ({"record": {"columns": [{"name": "x", "per": "day"}]}}, "must be .token., .*found 'day'"),
        ({"record": {"columns": [{"name": "x", "per": "token", "dtyp": "int8"}]}}, "dtyp"),
        (
            {"evaluation": {"sampling": {"temprature": 0.0}}},
            "unknown key .temprature. in section .evaluation.sampling.; did you mean .temperature.",
        ),
        ({"evaluation": {"sampling": {"top_p": 2.0}}}, "top_p"),
    ],
)
def test_a_column_or_an_evaluation_that_cannot_be_is_refused_at_the_start(
    section: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        from_dict(tree(**section))


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"rollout": {"num_steps": 0}}, "rollout.num_steps must be a whole number, 1 or more, found 0"),
        ({"rollout": {"num_steps": "many"}}, "must be a whole number, 1 or more, found 'many'"),
        (
            {"rollout": {"staleness_policy": "wiat"}},
            'must be "wait", "drop", "retry", "mask" or "keep", found \'wiat\'; did you mean \'wait\'?',
        ),
        ({"sampling": {"top_p": 0}}, "sampling.top_p must be a number above 0, at most 1, found 0"),
        ({"sampling": {"temperature": float("inf")}}, "must be a number, 0 or more, found inf"),
        ({"sampling": {"temperature": float("nan")}}, "must be a number, 0 or more, found nan"),
        (
            {"sampling": {"seed": 1 << 70}},
            "sampling.seed must be a whole number, found 1180591620717411303424",
        ),
        ({"ring": {"bytes": 0}}, "ring.bytes must be a size such as 64MiB, not 0, found 0"),
        ({"trainer": {"stall_s": 0}}, "trainer.stall_s must be a time such as 30s, not 0, found 0"),
        ({"run": {"samples": "of"}}, "a size such as 64MiB or \"off\", found 'of'; did you mean 'off'?"),
        ({"engine": {"urls": "http://x"}}, "engine.urls must be a list of strings, found 'http://x'"),
        ({"engine": {"urls": ["a", 3]}}, "engine.urls[1] must be a string, found 3"),
        ({"launch": {"environment": {"A": True}}}, "launch.environment.A must be a string, found true"),
        ({"record": {"columns": [{"name": "x"}]}}, "record.columns[0].per must be given, found none"),
        (
            {"record": {"columns": [{"name": "x-", "per": "token"}]}},
            "must be a name of letters, digits and _",
        ),
        ({"data": {"path": ["a", "b"]}}, "data.path must be a path, found ['a', 'b']"),
    ],
)
def test_what_is_wrong_is_said_in_our_words(sections: dict[str, dict[str, Any]], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(tree(**sections))
    assert sentence in str(caught.value)
    assert not any(word in str(caught.value) for word in ("Expected", "`int`", "enum", "$."))


def test_every_rule_has_words() -> None:
    for key in by_path().values():
        assert not any(sign in key.words for sign in ("Annotated", "Meta(", "Literal", "another type")), key


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({"sampling": {"top_k": 0}}, ["sampling.top_k", "-1"]),
        ({"sampling": {"stop": ["a", ""]}}, ["sampling.stop"]),
        ({"sampling": {"stop_token_ids": [-1]}}, ["sampling.stop_token_ids"]),
        ({"evaluation": {"sampling": {"top_k": 0}}}, ["evaluation.sampling.top_k"]),
        ({"trainer": {"num_ranks": 7}}, ["trainer.num_ranks = 7", "found 6", "groups_per_step"]),
        ({"ring": {"lease_deadline_s": 1}}, ["ring.lease_deadline_s", "ring.lease_warning_s"]),
        ({"engine": {"router": True, "urls": ["http://a:1", "http://b:1"]}}, ["engine.router", "found 2"]),
        ({"data": {"shard": 2, "num_shards": 2}}, ["data.shard", "--shard"]),
    ],
)
def test_keys_that_contradict_each_other_are_refused_at_the_start(
    sections: dict[str, dict[str, Any]], keys: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(tree(**sections))
    assert all(key in str(caught.value) for key in keys)
