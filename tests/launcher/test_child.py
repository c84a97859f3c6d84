"""Children: exit codes as a shell tells them, ends that reach what left the group, nothing left over."""

import os
import select
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from fa_rollout.launcher.children.child import Child
from fa_rollout.process.orphans import adopted, children, end_orphans

# Starts a grandchild in a session of its own, as torchrun does with its ranks, and tells its number.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def wait_for(condition: object, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def grandchild(log: Path) -> psutil.Process:
    wait_for(lambda: log.read_text().endswith("\n"))
    return psutil.Process(int(log.read_text()))


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_exit_codes_are_those_of_a_shell(script: str, code: int) -> None:
    child = Child("it", ["sh", "-c", script])
    assert select.select([child.pidfd], [], [], 10)[0]
    wait_for(lambda: child.exit_code is not None)
    assert child.exit_code == code
    child.end()


def test_environment_is_added_and_output_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    child = Child("it", ["sh", "-c", "echo $HOME; echo $EXTRA >&2"], environment={"EXTRA": "more"}, log=log)
    wait_for(lambda: child.exit_code is not None)
    assert log.read_text().split() == [os.environ["HOME"], "more"]
    child.end()


def test_an_end_reaches_descendants_in_their_own_sessions(tmp_path: Path) -> None:
    child = Child("it", [sys.executable, "-c", PARENT], log=tmp_path / "log")
    below = grandchild(tmp_path / "log")
    child.end()
    assert child.exit_code == 137
    wait_for(lambda: not below.is_running() or below.status() == psutil.STATUS_ZOMBIE)


def test_an_end_is_idempotent_and_gives_the_pidfd_back() -> None:
    child = Child("it", ["sleep", "60"])
    child.end()
    child.end()
    assert child.pidfd is None


def test_a_child_does_not_get_the_terminals_interrupt() -> None:
    child = Child("it", ["sleep", "60"])
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    child.end()


def test_orphans_of_a_killed_child_are_adopted_and_ended(tmp_path: Path) -> None:
    with adopted():
        before = set(children())
        child = Child("it", [sys.executable, "-c", PARENT], log=tmp_path / "log")
        below = grandchild(tmp_path / "log")
        os.kill(child.pid, signal.SIGKILL)
        wait_for(lambda: child.exit_code is not None)
        wait_for(lambda: below.ppid() == os.getpid())
        assert end_orphans(before, grace_s=1.0) == 1
        assert not psutil.pid_exists(below.pid)
        child.end()


def test_children_that_were_there_before_are_not_orphans() -> None:
    child = Child("mine", ["sleep", "60"])
    with adopted():
        assert end_orphans(set(children()), grace_s=1.0) == 0
    assert child.exit_code is None
    child.end()
