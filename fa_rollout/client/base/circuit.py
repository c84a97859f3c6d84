"""Whether one engine gets requests: pure bookkeeping of its failures, on a given clock.

States: CLOSED (requests flow), OPEN after failures in a row (none flow, a prober asks), CLOSED by a probe.
Overload never opens a circuit: it narrows the lane instead, as TCP does with its window.
"""

from enum import StrEnum


class CircuitState(StrEnum):
    """Whether requests flow."""

    CLOSED = "closed"
    OPEN = "open"


class Circuit:
    """Counts transient failures in a row."""

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self.state = CircuitState.CLOSED
        self.failures_in_row = 0
        self.last_error = ""

    @property
    def is_open(self) -> bool:
        """True while no request may go to the engine."""
        return self.state is CircuitState.OPEN

    def succeed(self) -> None:
        """A whole answer, of any kind: the engine works."""
        self.failures_in_row = 0

    def fail(self, error: str) -> bool:
        """A transient failure; True when it opens the circuit."""
        self.failures_in_row += 1
        self.last_error = error
        return self.failures_in_row >= self._max_failures and self.open(error)

    def open(self, error: str) -> bool:
        """The engine is known to be away; True when it was not known before."""
        self.last_error = error
        was_open, self.state = self.is_open, CircuitState.OPEN
        return not was_open

    def close(self) -> None:
        """A probe succeeded."""
        self.state = CircuitState.CLOSED
        self.failures_in_row = 0


class Window:
    """How many requests an engine may hold: halved by an overload, one more with each success."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.allowed = capacity
        self.not_before = 0.0
        """No dispatch before this time (the caller's clock)."""
        self._next_cut = 0.0
        self._cuts_in_row = 0

    def resize(self, capacity: int) -> None:
        """Another number of requests from now on; what is in flight beyond it ends."""
        is_whole, self.capacity = self.allowed == self.capacity, capacity
        self.allowed = capacity if is_whole else min(self.allowed, capacity)

    def grow(self) -> None:
        """A request succeeded."""
        self._cuts_in_row = 0
        if self.allowed < self.capacity:
            self.allowed += 1

    def cut(self, in_flight: int, now: float, base_s: float, cap_s: float, share: float) -> None:
        """An overload: once per back-off period the window halves; dispatch rests for a random time."""
        if now < self._next_cut:
            return
        self.allowed = max(1, min(self.allowed, in_flight) // 2)
        period = min(cap_s, base_s * 2.0**self._cuts_in_row)
        self._cuts_in_row += 1
        self.not_before = now + share * period / 2
        self._next_cut = now + period

    def rest(self, until: float) -> None:
        """No dispatch before this time, or one that is later already."""
        self.not_before = max(self.not_before, until)

    def restart(self) -> None:
        """After an outage: begin small, so that a cold engine is not flooded."""
        self.allowed = min(self.capacity, 8)
