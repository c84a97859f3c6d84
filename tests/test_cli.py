"""The command line: mistakes end in one message and code 2 before anything starts; help teaches."""

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from fa_rollout.account.events import HubBegan
from fa_rollout.cli import main, parser
from fa_rollout.config import load
from fa_rollout.config.keys import take_flags
from fa_rollout.verbs.configured import configuration
from fa_rollout.verbs.run import EXAMPLE


def run(*words: str, folder: Path | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "fa_rollout.cli", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "words", [["--help"], ["run", "--help"], ["demo", "--help"], ["replay", "--help"], ["--version"]]
)
def test_help_ends_well(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0
    assert "fa-rollout-proc" in capsys.readouterr().out


def test_help_documents_every_exit_code_and_shows_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f" {code}  " in text for code in (0, 1, 2, 69, 70, 130))
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = capsys.readouterr().out
    assert "fa_rollout.ranks" in text
    assert "[rollout]" in text


def test_the_configuration_that_help_shows_is_accepted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = EXAMPLE.splitlines()[2:]
    (tmp_path / "run.toml").write_text("\n".join(lines))
    assert load(tmp_path / "run.toml").rollout.groups_per_step == 16


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "nowhere.toml"], "nowhere.toml"),
        (["demo", "--", "torchrun"], "demo takes no trainer command"),
        (["demo", "--steps", "0"], "1 or more"),
        (["rn"], "run"),
        ([], "COMMAND"),
        (["run", "empty.toml"], "[data] must be given, found none; `fa-rollout-proc run --help`"),
        (["config", "table.toml"], "rollout must be a table, found 3"),
        (
            ["config", "good.toml", "--rollout.staleness", "x"],
            "rollout.staleness must be a whole number, 0 or more, found 'x'",
        ),
        (["replay", "nowhere.jsonl", "good.toml"], "run.replay: the log nowhere.jsonl cannot be read"),
        (["replay", "empty.toml", "good.toml"], "run.replay must name the events.jsonl of a run"),
        (["report", "over", "--output", "nowhere/page.html"], "nowhere/page.html: No such file"),
        (["top", "over"], "over holds a run that has ended: fa-rollout-proc report over"),
        (["simulate", "--engines", "0"], "1 or more, found '0'"),
        (["simulate", "--lengths", "nowhere"], "found nowhere: No such file"),
    ],
)
def test_a_mistake_is_code_two_and_one_message(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.toml").touch()
    Path("table.toml").write_text("rollout = 3\n[data]\npath = 'x'\n[reward]\nfunction = 'a:b'\n")
    Path("good.toml").write_text("\n".join(EXAMPLE.splitlines()[2:]))
    Path("over").mkdir()
    began = HubBegan(run="r", lineage="a", time_s=0.0, folder="", config={})
    Path("over/events.jsonl").write_bytes(msgspec.json.encode(began))
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_an_interrupt_ends_without_a_traceback() -> None:
    play = ["simulate", "--train-s", "1s", "--sweep", "staleness=0..8", "--seeds", "10000"]
    command = [sys.executable, "-X", "importtime", "-m", "fa_rollout.cli", *play]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rstrip().endswith("fa_rollout.simulation.table"):
                break
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in said
    assert said.endswith("fa-rollout-proc: interrupted\n")


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m fa_rollout.cli run --help-keys | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.returncode in (0, 141), "0 where all of it fits into the pipe"


def test_a_shard_must_be_one_of_its_number(tmp_path: Path) -> None:
    for text in ("2/2", "1", "a/b", "-1/2"):
        done = run("run", "none.toml", f"--shard={text}", folder=tmp_path)
        assert done.returncode == 2
        assert "must be I/N with I from 0 to N - 1" in done.stderr


def test_an_unknown_key_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[data]\npath = "x"\n[rollout]\nnum_stepz = 1\ngroups_per_step = 1\nsamples_per_group = 1\n'
        '[reward]\nfunction = "a.b"\n'
    )
    done = run("run", "run.toml", folder=tmp_path)
    assert done.returncode == 2
    assert "num_steps" in done.stderr
    assert "Traceback" not in done.stderr


def test_failed_checks_are_all_shown_with_their_fixes_and_nothing_starts(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[data]\npath = "none.jsonl"\n[rollout]\nnum_steps = 1\ngroups_per_step = 1\nsamples_per_group = 1\n'
        '[reward]\nfunction = "not_here.reward"\n[engine]\nurls = ["http://127.0.0.1:9"]\n'
    )
    done = run("run", "run.toml", "--", "no-such-program", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("fix: ") == 3
    for name in ("none.jsonl", "not_here", "no-such-program"):
        assert name in done.stderr


def test_the_shard_of_the_command_line_is_known_to_the_checks() -> None:
    words = ["--engine.shared", "--engine.urls", "http://a:1", "--data.path", "x", "--reward.function", "t:r"]
    words += [
        "--rollout.num_steps",
        "1",
        "--rollout.groups_per_step",
        "1",
        "--rollout.samples_per_group",
        "1",
    ]
    own, changes = take_flags(words)
    options = parser().parse_args(["run", *own, "--shard", "1/2"])
    options.changes = changes
    assert configuration(options).data.shard == 1


def test_a_trainers_command_without_dashes_is_told_where_they_go(tmp_path: Path) -> None:
    done = run("run", "run.toml", "python", "train.py", folder=tmp_path)
    assert done.returncode == 2
    assert "put -- before the trainer's command: fa-rollout-proc run ... -- python train.py" in done.stderr
