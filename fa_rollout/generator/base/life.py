"""When and why the generator ends: signals, the parent's death, the hub's word.

| cause | what follows |
|---|---|
| `Stop`, SIGTERM | drain: no new request, our running ones aborted, groups given back; exit 0 |
| SIGTERM again | the process ends at once |
| SIGINT | nothing: a terminal sends it to the whole group, and the launcher decides |
| the parent dies, or closes the channel | our requests are aborted; exit within `ORPHAN_LIMIT_S` |

Invariant: from the first cause on, the process ends within a limit, whatever hangs.
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
    """The first cause."""

    reason: str
    grace_s: float
    exit_code: int


class Life:
    """Watches for the end; to be used on a running loop."""

    def __init__(self, parent_pid: int) -> None:
        self._parent_pid = parent_pid
        self._end: End | None = None
        self._ended = asyncio.Event()
        self.grace_s = 10.0
        """For a drain that a signal asks for."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Signals and the parent's death are noticed inside of this block.

        Where pidfds are refused, the channel's end tells of the parent's.
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
        """End in order."""
        self._begin(End(reason=reason, grace_s=grace_s, exit_code=0), limit_s=grace_s + 1.0)

    def orphan(self, reason: str) -> None:
        """End because nobody is left to work for."""
        self._begin(End(reason=reason, grace_s=ORPHAN_LIMIT_S / 2, exit_code=1), limit_s=ORPHAN_LIMIT_S)

    async def ended(self) -> End:
        """Return the first cause, once there is one."""
        await self._ended.wait()
        assert self._end is not None
        return self._end

    async def unless_ended(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None when the end came first, and `work` was cancelled."""
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
