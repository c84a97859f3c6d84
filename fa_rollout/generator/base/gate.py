"""A gate with named holds: work passes while nobody holds it.

Invariant: the time that a gate is closed or frozen never counts against a deadline that was taken from it:
a long wait for an engine that someone paused, or that answers no request, is no failure of the request.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType

from fa_rollout.client.base.patience import TROUBLE_LISTENER, Trouble
from fa_rollout.generator.base.errors import SampleFailed


class Gate:
    """Open while no reason holds it."""

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
        """The reasons that hold it now."""
        return frozenset(self._holds)

    def hold(self, reason: str) -> None:
        """Close for this reason; idempotent."""
        self._holds.add(reason)
        self._opened.clear()
        self._set_clocks()

    def release(self, reason: str) -> None:
        """Take this reason back; idempotent."""
        self._holds.discard(reason)
        if self._holds or self._opened.is_set():
            return
        self._opened.set()
        self._set_clocks()
        self._on_open()

    def freeze(self, reason: str, is_frozen: bool) -> None:
        """Stop every deadline's clock while work still passes, because no request is answered; idempotent."""
        (self._frozen.add if is_frozen else self._frozen.discard)(reason)
        self._set_clocks()

    @property
    def stops_clocks(self) -> bool:
        """Whether no deadline runs now."""
        return bool(self._holds or self._frozen)

    def _set_clocks(self) -> None:
        for deadline in self._deadlines:
            deadline.set_clock()

    async def passed(self) -> None:
        """Return once it is open."""
        while self._holds:
            await self._opened.wait()

    def deadline(self, seconds: float | None) -> "GateDeadline":
        """A timeout whose clock stops while the gate is closed or frozen; `None`: no timeout."""
        return GateDeadline(self, self._deadlines, seconds)


class GateDeadline:
    """An async context manager that ends its body after some time of work.

    Its clock also stops while a request of the body meets server trouble: other requests may be answered
    while this one still waits for its next try.
    """

    def __init__(self, gate: Gate, others: "set[GateDeadline]", seconds: float | None) -> None:
        self._gate = gate
        self._others = others
        self._seconds = seconds
        self._timeout = asyncio.timeout(seconds)
        self._left_s: float | None = None
        """While its clock is stopped."""
        self._troubles: set[Trouble] = set()
        self._active_s = 0.0
        self._runs_since_s: float | None = None
        """None while its clock is stopped."""

    @property
    def active_s(self) -> float:
        """Seconds of work in the body so far, limited or not."""
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
            SampleFailed: the body took longer.
        """
        self._others.discard(self)
        TROUBLE_LISTENER.reset(self._token)
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise SampleFailed(f"deadline: not done within {self._seconds:g} s") from None

    def on_trouble(self, trouble: Trouble, is_open: bool) -> None:
        """A request of the body met server trouble, or it is over; idempotent."""
        (self._troubles.add if is_open else self._troubles.discard)(trouble)
        self.set_clock()

    def set_clock(self) -> None:
        """Stop the clock or let it run, as the gate and the troubles of the body require."""
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
