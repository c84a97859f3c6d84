"""Keeps the event loop responsive: work that arrives in bursts is spread over iterations of the loop.

A thousand answers may arrive in one iteration, and as many requests leave; done at once, they would delay
timers, control messages and all other I/O by a second. Order is kept: first come, first served.
"""

import asyncio
from collections import deque

TURN_S = 0.005
"""CPU time of the work allowed per iteration of the loop."""


class Pacing:
    """Spreads work over iterations of the loop, by its estimated cost."""

    def __init__(self, turn_s: float = TURN_S) -> None:
        self._turn_s = turn_s
        self._spent_s = 0.0
        self._is_turning = False
        self._queue: deque[tuple[asyncio.Future[None], float]] = deque()

    async def enter(self, cost_s: float) -> None:
        """Wait for this work's turn; returns immediately while the current iteration has room."""
        if not self._queue and self._spent_s < self._turn_s:
            self._spend(cost_s)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((future, cost_s))
        await future

    def _spend(self, cost_s: float) -> None:
        self._spent_s += cost_s
        if not self._is_turning:
            self._is_turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Runs once per iteration of the loop while there is work."""
        self._spent_s, self._is_turning = 0.0, False
        while self._queue and self._spent_s < self._turn_s:
            future, cost_s = self._queue.popleft()
            if not future.done():
                future.set_result(None)
                self._spend(cost_s)
