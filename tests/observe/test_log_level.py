"""`--log-level` is the level of every process of a run but the trainer."""

import logging

import pytest

from fa_rollout import cli
from fa_rollout.process import log_level
from tests.observe.watching import MakeRig, train

PUBLISHED = "generator INFO fa_rollout.generator.updates.engine_updates event=weights_published"


@pytest.mark.parametrize(("level", "is_told"), [("info", True), ("error", False)])
def test_the_generator_logs_at_the_level_of_the_command(
    rig: MakeRig,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    level: str,
    is_told: bool,
) -> None:
    monkeypatch.setenv(log_level.VARIABLE, level)
    with rig() as run, run.attach() as hook:
        train(hook, 1)
    assert (PUBLISHED in capfd.readouterr().err) == is_told


def test_the_command_passes_its_level_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log_level.VARIABLE, "error")
    assert cli.parser().parse_args(["demo"]).log_level == "error"
    assert cli.parser().parse_args(["--log-level", "debug", "demo"]).log_level == "debug"
    log_level.pass_on("debug")
    assert logging.getLevelNamesMapping()[log_level.chosen().upper()] == logging.DEBUG
    monkeypatch.setenv(log_level.VARIABLE, "loud")
    assert log_level.chosen() == "warning"


def test_no_message_starts_a_line_of_its_own_or_acts_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging, "root", logging.RootLogger(logging.WARNING))
    log_level.configure("hub")
    said = "body\nhub ERROR forged\x1b[2J\u202e"
    try:
        raise ValueError(said)
    except ValueError:
        logging.root.exception("event=x error=%s", said)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [
        r"hub ERROR root event=x error=body\nhub ERROR forged\x1b[2J\u202e"
    ]
    assert all(line.isprintable() for line in lines)
