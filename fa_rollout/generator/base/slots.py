"""Slots for samples: a semaphore whose limit can change.

Invariant: first come, first served; no slot is handed out while the limit is reached.
"""

import asyncio
from collections import deque
from types import TracebackType


class Slots:
    """A resizable semaphore; use `async with` to hold a slot."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_taken = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    def resize(self, limit: int) -> None:
        """Change the limit; slots that are already held beyond it are kept."""
        self._limit = limit
        self._give()

    async def __aenter__(self) -> None:
        if self._num_taken < self._limit and not self._waiters:
            self._num_taken += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        self._num_taken -= 1
        self._give()

    def _give(self) -> None:
        while self._waiters and self._num_taken < self._limit:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._num_taken += 1
                waiter.set_result(None)
