"""A gate with named holds: work passes while there is no hold.

Invariant: time during which the gate is closed or frozen does not count against its deadlines. A long wait
for a paused or unresponsive engine is not a failure of the request.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType

from fa_rollout.client.base.patience import TROUBLE_LISTENER, Trouble
from fa_rollout.generator.base.errors import SampleFailed


class Gate:
    """Open while no hold is set."""

    def __init__(self, on_open: Callable[[], None] = lambda: None) -> None:
        self._holds: set[str] = set()
        self._opened = asyncio.Event()
        self._opened.set()
        self._on_open = on_open
        self._deadlines: set[GateDeadline] = set()
        self._frozen: set[str] = set()

    @property
    def is_open(self) -> bool:
        return not self._holds

    @property
    def holds(self) -> frozenset[str]:
        """The current holds."""
        return frozenset(self._holds)

    def hold(self, reason: str) -> None:
        """Close for this reason; idempotent."""
        self._holds.add(reason)
        self._opened.clear()
        self._set_clocks()

    def release(self, reason: str) -> None:
        """Remove this hold; idempotent."""
        self._holds.discard(reason)
        if self._holds or self._opened.is_set():
            return
        self._opened.set()
        self._set_clocks()
        self._on_open()

    def freeze(self, reason: str, is_frozen: bool) -> None:
        """Stop (or restart) all deadlines' clocks without closing, as no request is answered; idempotent."""
        (self._frozen.add if is_frozen else self._frozen.discard)(reason)
        self._set_clocks()

    @property
    def stops_clocks(self) -> bool:
        """Whether all deadlines are stopped."""
        return bool(self._holds or self._frozen)

    def _set_clocks(self) -> None:
        for deadline in self._deadlines:
            deadline.set_clock()

    async def passed(self) -> None:
        """Wait until the gate is open."""
        while self._holds:
            await self._opened.wait()

    def deadline(self, seconds: float | None) -> "GateDeadline":
        """A timeout whose clock stops while the gate is closed or frozen; `None` means no timeout."""
        return GateDeadline(self, self._deadlines, seconds)


class GateDeadline:
    """An async context manager that limits the active time of its body.

    Its clock also stops while a request of the body waits to retry after a server error.
    """

    def __init__(self, gate: Gate, others: "set[GateDeadline]", seconds: float | None) -> None:
        self._gate = gate
        self._others = others
        self._seconds = seconds
        self._timeout = asyncio.timeout(seconds)
        self._left_s: float | None = None
        """The remaining time while its clock is stopped."""
        self._troubles: set[Trouble] = set()
        self._active_s = 0.0
        self._runs_since_s: float | None = None
        """None while its clock is stopped."""

    @property
    def active_s(self) -> float:
        """Active seconds of the body so far."""
        if self._runs_since_s is None:
            return self._active_s
        return self._active_s + asyncio.get_running_loop().time() - self._runs_since_s

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._others.add(self)
        self._token = TROUBLE_LISTENER.set(self.on_trouble)
        self.set_clock()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """
        Raises:
            SampleFailed: the body exceeded the limit.
        """
        self._others.discard(self)
        TROUBLE_LISTENER.reset(self._token)
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise SampleFailed(f"deadline: not done within {self._seconds:g} s") from None

    def on_trouble(self, trouble: Trouble, is_open: bool) -> None:
        """A request of the body met a server error, or recovered from it; idempotent."""
        (self._troubles.add if is_open else self._troubles.discard)(trouble)
        self.set_clock()

    def set_clock(self) -> None:
        """Stop or start the clock, depending on the gate and on server errors of the body's requests."""
        now_s, when_s = asyncio.get_running_loop().time(), self._timeout.when()
        is_stopped = bool(self._gate.stops_clocks or self._troubles)
        self._active_s, self._runs_since_s = self.active_s, None if is_stopped else now_s
        if self._timeout.expired() or self._seconds is None:
            return
        if is_stopped:
            if when_s is not None:
                self._left_s = when_s - now_s
                self._timeout.reschedule(None)
        elif self._left_s is not None:
            self._timeout.reschedule(now_s + self._left_s)
            self._left_s = None
