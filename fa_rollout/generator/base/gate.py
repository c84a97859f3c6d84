"""A gate with named holds: work passes while nobody holds it.

Invariant: the time that a gate stands closed never counts against a deadline that was taken from it, for a
long block by an engine that someone paused is no failure of the request.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fa_rollout.generator.base.errors import SampleFailed


class Gate:
    """Open while no reason holds it."""

    def __init__(self, on_open: Callable[[], None] = lambda: None) -> None:
        self._holds: set[str] = set()
        self._opened = asyncio.Event()
        self._opened.set()
        self._on_open = on_open
        self._left_s: dict[asyncio.Timeout, float] = {}
        """What is left of each deadline, while the gate is closed."""
        self._clocks: set[asyncio.Timeout] = set()

    @property
    def is_open(self) -> bool:
        return not self._holds

    @property
    def holds(self) -> frozenset[str]:
        """The reasons that hold it now."""
        return frozenset(self._holds)

    def hold(self, reason: str) -> None:
        """Close for this reason; idempotent."""
        self._holds.add(reason)
        if self._opened.is_set():
            self._opened.clear()
            for clock in self._clocks:
                self._stop(clock)

    def release(self, reason: str) -> None:
        """Take this reason back; idempotent."""
        self._holds.discard(reason)
        if self._holds or self._opened.is_set():
            return
        self._opened.set()
        now = asyncio.get_running_loop().time()
        for clock, left_s in self._left_s.items():
            clock.reschedule(now + left_s)
        self._left_s.clear()
        self._on_open()

    async def passed(self) -> None:
        """Return once it is open."""
        while self._holds:
            await self._opened.wait()

    @asynccontextmanager
    async def deadline(self, seconds: float | None) -> AsyncIterator[None]:
        """A timeout whose clock stands still while the gate is closed; `None`: no timeout.

        Raises:
            SampleFailed: the body took longer.
        """
        clock = asyncio.timeout(seconds)
        try:
            async with clock:
                self._clocks.add(clock)
                if self._holds:
                    self._stop(clock)
                yield
        except TimeoutError:
            if not clock.expired():
                raise
            raise SampleFailed(f"deadline: not done within {seconds:g} s") from None
        finally:
            self._clocks.discard(clock)
            self._left_s.pop(clock, None)

    def _stop(self, clock: asyncio.Timeout) -> None:
        when = clock.when()
        if when is not None and not clock.expired():
            self._left_s[clock] = when - asyncio.get_running_loop().time()
            clock.reschedule(None)
