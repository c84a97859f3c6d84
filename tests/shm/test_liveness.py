"""Whether another process lives."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from shm.liveness import ParentWatch, has_ended, open_pidfd, wait_ended

_ROOT = Path(__file__).parents[2]


def test_a_pidfd_tells_the_end_of_a_process() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        pidfd = open_pidfd(process.pid)
        assert pidfd is not None
        assert not has_ended(pidfd)
        assert not wait_ended(pidfd, 0.01)
        process.kill()
        assert wait_ended(pidfd, 10)
        assert has_ended(pidfd)
        os.close(pidfd)
    with pytest.raises(ProcessLookupError):
        open_pidfd(process.pid)


@pytest.mark.parametrize("refused", ["", "import os; del os.pidfd_open"])
def test_a_child_sees_its_parents_death_however_it_comes(refused: str) -> None:
    child = f"""
        import os, sys, time
        {refused}
        from shm.liveness import ParentWatch
        watch = ParentWatch(int(sys.argv[1]))
        assert (watch.pidfd is None) == bool({refused!r})
        assert not watch.has_ended()
        print("watching", flush=True)
        while not watch.has_ended():
            time.sleep(0.01)
        watch.close()
        print("orphan", flush=True)
    """
    parent = f"""
        import os, subprocess, sys
        subprocess.Popen([sys.executable, "-c", {textwrap.dedent(child)!r}, str(os.getpid())])
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent)],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "watching\n"
        process.send_signal(signal.SIGKILL)
        assert process.stdout.readline() == "orphan\n"


def test_a_parent_that_ended_before_the_watch_began_is_not_mistaken_for_another() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert ParentWatch(process.pid).has_ended()
    stranger = os.getppid() if os.getppid() > 1 else 1
    assert ParentWatch(stranger).has_ended() == (stranger != os.getppid())
    assert ParentWatch(os.getpid()).has_ended()  # alive, but not the parent of this process
