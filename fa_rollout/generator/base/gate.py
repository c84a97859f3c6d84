"""A gate with named holds: work passes while nobody holds it.

Invariant: the time that a gate stands closed or frozen never counts against a deadline that was taken from
it, for a long block by an engine that someone paused, or that answers nobody, is no failure of the request.
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
        self._frozen: set[str] = set()

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
        self._opened.clear()
        self._stop_all()

    def release(self, reason: str) -> None:
        """Take this reason back; idempotent."""
        self._holds.discard(reason)
        if self._holds or self._opened.is_set():
            return
        self._opened.set()
        self._go_on()
        self._on_open()

    def freeze(self, reason: str, is_frozen: bool) -> None:
        """Deadlines stand still though work passes: what it is passed to works for nobody; idempotent."""
        if is_frozen:
            self._frozen.add(reason)
            self._stop_all()
        else:
            self._frozen.discard(reason)
            self._go_on()

    @property
    def _stands_still(self) -> bool:
        return bool(self._holds or self._frozen)

    def _go_on(self) -> None:
        if self._stands_still:
            return
        now = asyncio.get_running_loop().time()
        for clock, left_s in self._left_s.items():
            clock.reschedule(now + left_s)
        self._left_s.clear()

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
                if self._stands_still:
                    self._stop(clock)
                yield
        except TimeoutError:
            if not clock.expired():
                raise
            raise SampleFailed(f"deadline: not done within {seconds:g} s") from None
        finally:
            self._clocks.discard(clock)
            self._left_s.pop(clock, None)

    def _stop_all(self) -> None:
        for clock in self._clocks:
            self._stop(clock)

    def _stop(self, clock: asyncio.Timeout) -> None:
        when = clock.when()
        if when is not None and not clock.expired():
            self._left_s[clock] = when - asyncio.get_running_loop().time()
            clock.reschedule(None)
