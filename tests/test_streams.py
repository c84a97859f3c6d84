"""Output never stops or holds up a process: each way in which a descriptor can fail, with a real process."""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import faulthandler, logging, os, sys
from fa_rollout.process import streams
streams.secure()
faulthandler.enable()
logging.basicConfig()
for i in range({rounds}):
    print("out", "x" * 200, flush=True)
    logging.error("err %s", "y" * 200)
os.write({result}, b"done")
"""


def command(result: int, rounds: int) -> list[str]:
    return [sys.executable, "-c", PROGRAM.format(result=result, rounds=rounds)]


def finishes(words: list[str], rounds: int = 20, output: int | None = None) -> None:
    """The program gets to its end, with code 0; `words`: what it is started by."""
    ours, theirs = os.pipe()
    words = [*words, *command(theirs, rounds)]
    with subprocess.Popen(words, stdout=output, stderr=output, pass_fds=[theirs]) as process:
        os.close(theirs)
        try:
            assert select.select([ours], [], [], 30.0)[0]
            assert os.read(ours, 4) == b"done"
            assert process.wait(timeout=30) == 0
        finally:
            os.close(ours)
            process.kill()


@pytest.mark.parametrize("redirection", [">/dev/full 2>&1", ">&- 2>&-", "<&- >&- 2>&-", "2>&-", ">&-"])
def test_a_full_disk_and_closed_descriptors_cost_text_only(redirection: str) -> None:
    finishes(["sh", "-c", f'exec "$@" {redirection}', "sh"])


def test_a_pipe_whose_reader_went() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    finishes([], output=writer)
    os.close(writer)


def test_a_pipe_that_nobody_reads() -> None:
    reader, writer = os.pipe()
    finishes([], rounds=1000, output=writer)
    os.close(writer)
    os.close(reader)


def test_a_terminal_that_is_lost() -> None:
    master, terminal = os.openpty()
    os.close(master)
    finishes([], output=terminal)
    os.close(terminal)


def test_a_descriptor_that_somebody_made_non_blocking_loses_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    ours, theirs = os.pipe()
    with subprocess.Popen(
        command(theirs, 800), stdout=writer, stderr=subprocess.DEVNULL, pass_fds=[theirs]
    ) as process:
        os.close(writer)
        time.sleep(0.5)
        found = b""
        while chunk := os.read(reader, 1 << 16):
            found += chunk
        assert process.wait(timeout=30) == 0
    for fd in (reader, ours, theirs):
        os.close(fd)
    assert found.count(b"out") == 800


def test_what_is_written_arrives_in_order_and_before_the_end() -> None:
    program = (
        "from fa_rollout.process import streams; streams.secure()\n"
        "for i in range(5000): print(i)\n"
        "raise SystemExit('last')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.split() == [str(i) for i in range(5000)]
    assert done.stderr == "last\n"
    assert done.returncode == 1


def test_a_forked_child_prints_too() -> None:
    program = (
        "from fa_rollout.process import streams; streams.secure(); import multiprocessing as m\n"
        "print('parent', flush=True)\n"
        "p = m.get_context('fork').Process(target=print, args=('child',)); p.start(); p.join()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "parent\nchild\n"
