"""When and why the generator ends: signals, the parent's death, a message of the hub.

| cause | effect |
|---|---|
| `Stop`, SIGTERM | drain: no new requests, running requests aborted, groups returned to the hub; exit 0 |
| second SIGTERM | the process exits immediately |
| SIGINT | ignored: a terminal sends it to the whole process group, and the launcher decides |
| the parent dies or closes the channel | running requests are aborted; exit within `ORPHAN_LIMIT_S` |

Invariant: after the first cause, the process exits within a limit, whatever hangs.
"""

import asyncio
import faulthandler
import os
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fa_rollout.generator.base.tasks import first_error
from shm.liveness import ParentWatch

T = TypeVar("T")

ORPHAN_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Why and how the generator ends."""

    reason: str
    grace_s: float
    exit_code: int


class Life:
    """Watches for causes to end; use it on a running loop."""

    def __init__(self, parent_pid: int) -> None:
        self._parent_pid = parent_pid
        self._end: End | None = None
        self._ended = asyncio.Event()
        self.grace_s = 10.0
        """For a drain requested by a signal."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch signals and the parent's death inside this block.

        Without pidfds, the channel's end reveals the parent's death.
        """
        loop = asyncio.get_running_loop()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        parent = ParentWatch(self._parent_pid)
        if parent.pidfd is not None:
            loop.add_reader(parent.pidfd, self.orphan, "the hub died")
        elif parent.has_ended():
            self.orphan("the hub died")
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            if parent.pidfd is not None:
                loop.remove_reader(parent.pidfd)
            parent.close()

    def drain(self, reason: str, grace_s: float) -> None:
        """End gracefully."""
        self._begin(End(reason=reason, grace_s=grace_s, exit_code=0), limit_s=grace_s + 1.0)

    def orphan(self, reason: str) -> None:
        """End because the parent is gone."""
        self._begin(End(reason=reason, grace_s=ORPHAN_LIMIT_S / 2, exit_code=1), limit_s=ORPHAN_LIMIT_S)

    async def ended(self) -> End:
        """Wait for the first cause and return it."""
        await self._ended.wait()
        assert self._end is not None
        return self._end

    async def unless_ended(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None if the generator ended first and `work` was cancelled."""
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                working = tasks.create_task(work)
                ending = tasks.create_task(self._ended.wait())
                await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
                working.cancel()
                ending.cancel()
        return None if working.cancelled() else working.result()

    def _begin(self, end: End, *, limit_s: float) -> None:
        if self._end is None:
            self._end = end
            self._ended.set()
            faulthandler.dump_traceback_later(limit_s, exit=True)

    def _on_sigterm(self) -> None:
        if self._end is not None:
            os._exit(128 + signal.SIGTERM)
        self.drain("the generator got SIGTERM", self.grace_s)
