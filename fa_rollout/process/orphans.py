"""Orphans: processes whose parent, a child of this process, has died.

Out: the orphans, which the kernel reparents to this process while it is their subreaper (a killed `torchrun`
leaves its ranks this way). Invariant: only new children of this process that it did not start are killed.
"""

import contextlib
import ctypes
import time
from collections.abc import Collection, Iterator

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_MAX_ROUNDS = 10
_ROUND_S = 0.5


@contextlib.contextmanager
def adopted() -> Iterator[None]:
    """Become the parent of orphaned descendants; no effect if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int(0)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def children() -> dict[int, psutil.Process]:
    """Children of this process by number."""
    return {process.pid: process for process in psutil.Process().children()}


def kill_all_below(limit_s: float) -> None:
    """Kill every descendant and wait for it, within the limit; for a process that is their subreaper."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        below = psutil.Process().children(recursive=True)
        if not below:
            return
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, timeout=_ROUND_S)


def end_orphans(known: Collection[int], grace_s: float) -> int:
    """End every child whose pid is not `known`, with its descendants, and wait; returns their number.

    An orphan's children are reparented to this process when it dies, so this repeats until none is left, or
    one is stuck in the kernel.
    """
    num_ended = 0
    for _ in range(_MAX_ROUNDS):
        orphans = [process for pid, process in children().items() if pid not in known]
        if not orphans:
            break
        num_ended += len(orphans)
        for process in orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(orphans, timeout=grace_s)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=grace_s)
    return num_ended
