"""Configuration keys as flags: read like a file's values, checked by the same rules, named when misspelt."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fa_rollout.cli import main
from fa_rollout.config import ConfigError, load, to_dict, to_toml
from fa_rollout.config.keys import by_path, nearest, take_flags
from fa_rollout.verbs.run import EXAMPLE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(EXAMPLE[EXAMPLE.index("  [data]") :] + "\n[evaluation]\nsampling = {temperature = 0.5}\n")
    return path


def loaded(file: Path, *words: str) -> dict[str, Any]:
    rest, changes = take_flags(words)
    assert rest == []
    return to_dict(load(file, changes))


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--rollout.staleness 2", "rollout.staleness", 2),
        ("--rollout.staleness=2", "rollout.staleness", 2),
        ("--rollout.staleness 1 --rollout.staleness 3", "rollout.staleness", 3),
        ("--rollout.staleness_policy keep", "rollout.staleness_policy", "keep"),
        ("--ring.bytes 8GiB", "ring.bytes", 8 << 30),
        ("--ring.bytes 1024", "ring.bytes", 1024),
        ("--run.grace_s 5m", "run.grace_s", 300.0),
        ("--rollout.group_timeout_s 30", "rollout.group_timeout_s", 30.0),
        ("--sampling.temperature .5", "sampling.temperature", 0.5),
        ("--sampling.top_k -1", "sampling.top_k", -1),
        ("--reward.function 7.seven:f", "reward.function", "7.seven:f"),
        ("--data.prompt_key 7", "data.prompt_key", "7"),
        ("--ring.poison", "ring.poison", True),
        ("--data.shuffle false", "data.shuffle", False),
        ("--sampling.stop a --sampling.stop 1", "sampling.stop", ["a", "1"]),
        ("--sampling.stop_token_ids 1 --sampling.stop_token_ids [2,3]", "sampling.stop_token_ids", [1, 2, 3]),
        ("--evaluation.sampling.top_p 0.9", "evaluation.sampling", {"temperature": 0.5, "top_p": 0.9}),
        ("--evaluation.datasets.hard 7.jsonl", "evaluation.datasets", {"hard": "7.jsonl"}),
        ('--evaluation.datasets {a="x"}', "evaluation.datasets", {"a": "x"}),
    ],
)
def test_a_flag_goes_over_the_file(file: Path, words: str, key: str, value: Any) -> None:
    section, name = key.split(".")
    assert loaded(file, *words.split())[section][name] == value


def test_a_list_on_the_command_line_replaces_the_files(file: Path) -> None:
    assert loaded(file, "--engine.urls", "http://a:1")["engine"]["urls"] == ["http://a:1"]


def test_tables_of_columns_are_toml(file: Path) -> None:
    column = '{name = "scores", per = "token"}'
    columns = loaded(file, "--record.columns", column, "--record.columns", column.replace("sc", "sc2"))
    assert [c["name"] for c in columns["record"]["columns"]] == ["scores", "sc2ores"]


def test_flags_alone_are_a_configuration() -> None:
    words = "--data.path x --rollout.num_steps 1 --rollout.groups_per_step 2 --rollout.samples_per_group 3"
    _, changes = take_flags([*words.split(), "--reward.function", "a:b", "--engine.model", "m"])
    assert load(None, changes).rollout.samples_per_group == 3


def test_every_key_has_a_flag_and_other_words_stay() -> None:
    tables = [path for path, key in by_path().items() if key.words.startswith("a table")]
    for path in by_path():
        assert take_flags([f"--{path}.x=1" if path in tables else f"--{path}=1"])[1]
    words = ["run", "run.toml", "--shard", "1/2", "--verbose"]
    assert take_flags([*words[:2], "--ring.poison", *words[2:]])[0] == words


@pytest.mark.parametrize(
    ("meant", "key"),
    [
        ("rollout.stalenes", "rollout.staleness"),
        ("run.staleness", "rollout.staleness"),
        ("staleness", "rollout.staleness"),
        ("rollout.max-attempts", "rollout.max_attempts"),
        ("engine.url", "engine.urls"),
        ("zebra.stripes", None),
    ],
)
def test_the_nearest_key_is_named(meant: str, key: str | None) -> None:
    assert nearest(meant) == key


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rollout.stalenes", "2"], "did you mean --rollout.staleness?"),
        (["--rollout.max-attempts", "2"], "did you mean --rollout.max_attempts?"),
        (["--staleness", "2"], "did you mean --rollout.staleness?"),
        (["--shrad", "0/1"], "did you mean --shard?"),
        (["--zebra"], "run --help"),
        (["--rollout.staleness"], "must be followed by its value"),
        (["--rollout.staleness", "two"], "rollout.staleness"),
        (["--rollout.staleness", "-1"], "rollout.staleness"),
        (["--ring.bytes", "8 apples"], "64MiB"),
        (["--rollout.staleness.x", "1"], "holds no table"),
        (["--evaluation.datasets", "x"], "--evaluation.datasets.NAME"),
    ],
)
def test_a_mistake_is_refused_before_anything_starts(
    file: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", str(file), *words])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_commands_without_a_configuration_take_no_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--rollout.staleness", "2"])
    assert "takes no configuration keys" in capsys.readouterr().err


def test_neither_file_nor_flags_is_told_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run"])
    assert "needs a CONFIG file" in capsys.readouterr().err


def test_the_effective_configuration_can_be_read_back(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--sampling.stop", 'a"\\\n\x7fß', "--ring.bytes", "1MiB", "--evaluation.datasets.a-b", "x"]
    assert main(["config", str(file), "--shard", "1/2", *words]) == 0
    (tmp_path / "again.toml").write_text(capsys.readouterr().out)
    again = load(tmp_path / "again.toml")
    assert again.sampling.stop == ['a"\\\n\x7fß']
    assert (again.data.shard, again.ring.bytes, again.evaluation.datasets) == (1, 1 << 20, {"a-b": "x"})


def test_tables_are_written_as_they_are_read() -> None:
    tree = {"a": {"x y": [1, 2.5, {"b": True, "c": [""]}], "t": "1\n", "big": 1e300}, "empty": {}}
    assert tomllib.loads(to_toml(tree)) == tree


def test_help_of_keys_explains_and_selects(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", "--help-keys"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(key.flag in text and " ".join(key.doc.split())[:40] in text for key in by_path().values())
    with pytest.raises(SystemExit):
        main(["run", "--help-keys", "staleness_policy"])
    text = capsys.readouterr().out
    assert '"wait", "drop", "retry", "mask" or "keep"; default "wait"' in text
    assert "--ring.bytes" not in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_options_and_keys(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("replay", "shard", "rollout.staleness", "wait"))


def test_bash_takes_the_completion_and_completes(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "fa_rollout.cli", "completion", "bash"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    (tmp_path / "complete.bash").write_text(made.stdout)
    ask = """
    source "$1"
    COMP_WORDS=(fa-rollout-proc run --rollout.stal) COMP_CWORD=2
    "$(complete -p fa-rollout-proc | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", ask, "bash", str(tmp_path / "complete.bash")],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stdout.split() == ["--rollout.staleness", "--rollout.staleness_policy"]


def test_a_flag_must_be_of_a_key() -> None:
    with pytest.raises(ConfigError, match="unknown configuration key"):
        take_flags(["--zebra.stripes", "1"])
