"""The ranks of a trainer on this machine, without an agent: `python -m fa_rollout.ranks 2 train.py ...`.

In: how many, and a Python program (`-m MODULE` too). Out: its exit code, or that of the first rank that
failed. Ranks find RANK, WORLD_SIZE and their LOCAL_ forms in the environment, as under torchrun, and meet
over a file in a private folder that INIT_METHOD names:

    dist.init_process_group("gloo", init_method=os.environ.get("INIT_METHOD"))

Invariant: nothing here listens; torchrun's rendezvous accepts connections on all addresses. A rank that fails
ends the others, and no rank outlives this process's orderly end.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

VARIABLE = "INIT_METHOD"
_POLL_S = 0.1
_GRACE_S = 10.0


class _Told(Exception):
    """A signal asks for the end."""


def environment(rank: int, num_ranks: int, folder: Path) -> dict[str, str]:
    """What torchrun would tell a rank, and where to meet the others."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        VARIABLE: f"file://{folder / 'store'}?rank={rank}&world_size={num_ranks}",
    }


def run(num_ranks: int, words: Sequence[str]) -> int:
    """Start the ranks, wait for all of them, and return the exit code."""
    signum = 0

    def tell(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal signum
        signum = number
        raise _Told

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, tell)
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for rank in range(num_ranks):
                # Its connections, too, stay on this machine.
                told = {
                    "GLOO_SOCKET_IFNAME": "lo",
                    **os.environ,
                    **environment(rank, num_ranks, Path(folder)),
                }
                ranks.append(subprocess.Popen([sys.executable, "-u", *words], env=told))
            return _wait(ranks)
        except _Told:
            return 128 + signum
        finally:
            _end(ranks)


def _wait(ranks: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Until all have ended well, or one has not."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            rank, code = failed[0]
            print(f"rank {rank} ended with exit code {code}; the others are ended", file=sys.stderr)
            return code if code > 0 else 128 - code
        if None not in codes:
            return 0
        time.sleep(_POLL_S)


def _end(ranks: Sequence["subprocess.Popen[bytes]"]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for rank in ranks:
        rank.terminate()
    deadline_s = time.monotonic() + _GRACE_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m fa_rollout.ranks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("number", type=int, help="of ranks")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="train.py, or -m MODULE, and its arguments")
    options = parser.parse_args(words)
    if options.number < 1 or not options.program:
        parser.error("give a number of ranks from 1 on, and the program that each runs")
    return run(options.number, options.program)


if __name__ == "__main__":
    sys.exit(main())
