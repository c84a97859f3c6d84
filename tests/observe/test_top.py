"""`fa-rollout-proc top` on a real run: in a terminal, without one, and to its end."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.hub.rig import Rig
from tests.observe.terminal import ENTER_SCREEN, Terminal
from tests.observe.watching import MakeRig, train

KEYS = {"q": b"q", "Escape": b"\x1b"}


def command(run: Rig, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fa_rollout.cli", "top", *words],
        env=run.environment | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_one_look_is_text_or_json(rig: MakeRig) -> None:
    with rig() as run, run.attach() as hook:
        train(hook, 2)
        text = command(run, "--once")
        assert text.returncode == 0, text.stderr
        assert f"fa_rollout {run.run_id[:8]}  step 2/6" in text.stdout
        assert "reward" in text.stdout
        assert "\x1b" not in text.stdout
        told = command(run, "--once", "--json")
        snapshot = json.loads(told.stdout)
        assert snapshot["run"]["num_trained"] == 2
        assert [step["step"] for step in snapshot["steps"]] == [0, 1]


def test_a_stuck_trainer_is_seen_and_the_end_is_told(rig: MakeRig) -> None:
    with (
        rig() as run,
        run.attach() as hook,
        Terminal("top", "--every", "0.2", environment=run.environment) as top,
    ):
        with hook.next_batch():
            # From here on this process does nothing for its run: what is shown comes from the hub.
            top.shows("training step 0")
            assert str(os.getpid()).encode() in top.output
        hook.close()
        run.stop()
        assert top.end() == 0
        assert b"the run has ended (exit code 0): the test is over" in top.output
        assert b"4 trained" in top.output
        assert top.is_as_before


def test_a_hub_that_does_not_answer_is_told_on_the_screen(rig: MakeRig) -> None:
    with rig() as run, Terminal("top", "--every", "0.2", environment=run.environment) as top:
        top.shows("waiting for the trainer to connect")
        run.process.send_signal(signal.SIGSTOP)
        top.shows("NO ANSWER FOR")
        run.process.send_signal(signal.SIGCONT)
        top.press(b"q")
        assert top.end() == 0


@pytest.mark.parametrize("how", ["q", "Escape", "SIGINT", "SIGTERM"])
def test_it_can_be_left_at_any_time_and_the_run_goes_on(rig: MakeRig, how: str) -> None:
    with rig() as run, run.attach() as hook:
        with Terminal("top", environment=run.environment, columns=130, rows=50) as top:
            top.shows("trainer")
            if how in KEYS:
                top.press(KEYS[how])
            else:
                top.process.send_signal(getattr(signal, how))
            assert top.end() == (143 if how == "SIGTERM" else 0)
            assert top.is_as_before
            assert ENTER_SCREEN in top.output
            assert b"Traceback" not in top.output
        train(hook, 1)


def test_without_a_terminal_there_is_a_line_now_and_then(rig: MakeRig) -> None:
    with rig() as run, run.attach() as hook:
        train(hook, 1)
        top = subprocess.Popen(
            [sys.executable, "-m", "fa_rollout.cli", "top", "--every", "0.1"],
            env=run.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert top.stdout is not None
        assert top.stdout.readline().startswith("step 1/6 reward=")
        hook.close()
        run.stop()
        rest, _ = top.communicate(timeout=30)
        assert "the run has ended" in rest
        assert top.returncode == 0


def test_where_no_run_goes_on_that_is_the_message(rig: MakeRig) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FA_ROLLOUT_")}
    done = subprocess.run(
        [sys.executable, "-m", "fa_rollout.cli", "top", "no-run-is-called-this"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "no active run 'no-run-is-called-this' of this user found" in done.stderr
    assert "Traceback" not in done.stderr
