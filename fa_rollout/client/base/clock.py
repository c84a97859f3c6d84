"""A clock that stands still while engines are paused, and timers on it.

Invariant: a deadline counts only the time in which engines could have answered.
"""

import asyncio
import time
from collections.abc import Callable


class ActiveClock:
    """Seconds of unpaused time."""

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or (lambda: time.monotonic())
        self.lost_s = 0.0
        """Paused time so far, without a pause that still lasts."""
        self._stopped_at: float | None = None
        self._asleep: set[Timer] = set()

    @property
    def is_stopped(self) -> bool:
        """True between `stop` and `go`."""
        return self._stopped_at is not None

    def now(self) -> float:
        """Unpaused seconds; only differences mean something."""
        return (self._now() if self._stopped_at is None else self._stopped_at) - self.lost_s

    def stop(self) -> None:
        """Engines stand still from now on; idempotent."""
        if self._stopped_at is None:
            self._stopped_at = self._now()

    def go(self) -> None:
        """Engines run again; idempotent."""
        if self._stopped_at is None:
            return
        self.lost_s += self._now() - self._stopped_at
        self._stopped_at = None
        asleep, self._asleep = self._asleep, set()
        for timer in asleep:
            timer.arm()

    def timer(self, deadline: float, expire: Callable[[], None]) -> "Timer":
        """Calls `expire` once when this clock reaches `deadline`, unless cancelled before."""
        timer = Timer(self, deadline, expire)
        timer.arm()
        return timer

    def put_to_sleep(self, timer: "Timer") -> None:
        """A timer that fell due in a pause waits for its end."""
        self._asleep.add(timer)

    def forget(self, timer: "Timer") -> None:
        """A timer that was cancelled."""
        self._asleep.discard(timer)


class Timer:
    """One deadline on an `ActiveClock`."""

    __slots__ = ("_clock", "_expire", "_handle", "deadline")

    def __init__(self, clock: ActiveClock, deadline: float, expire: Callable[[], None]) -> None:
        self.deadline = deadline
        self._clock = clock
        self._expire = expire
        self._handle: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        """Ask the loop for a call when the rest would be over without a pause."""
        rest = max(0.0, self.deadline - self._clock.now())
        self._handle = asyncio.get_running_loop().call_later(rest, self._due)

    def cancel(self) -> None:
        """No call any more; idempotent."""
        if self._handle is not None:
            self._handle.cancel()
        self._clock.forget(self)

    def _due(self) -> None:
        if self._clock.is_stopped:
            self._clock.put_to_sleep(self)
        elif self.deadline > self._clock.now() + 1e-3:
            self.arm()
        else:
            self._expire()
