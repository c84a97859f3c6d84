"""Whether one engine gets requests: pure bookkeeping of its failures, on a given clock.

States: CLOSED (requests flow), OPEN after failures in a row (none flow, a prober asks), CLOSED by a probe.
Untrue answers in a row open it too; a probe is believed only after a rest then, and longer each time.
Overload never opens a circuit: it narrows the lane instead, as TCP does with its window.
"""

from enum import StrEnum

_MOST_DOUBLINGS = 6


class CircuitState(StrEnum):
    """Whether requests flow."""

    CLOSED = "closed"
    OPEN = "open"


class Circuit:
    """Counts transient failures in a row, and untrue answers."""

    def __init__(self, max_failures: int, max_untrue: int = 3, untrue_rest_s: float = 10.0) -> None:
        self._max_failures = max_failures
        self._max_untrue = max_untrue
        self._untrue_rest_s = untrue_rest_s
        self.state = CircuitState.CLOSED
        self.failures_in_row = 0
        self.untrue_in_row = 0
        self.num_exposed = 0
        """Times in a row that it was taken out for untrue answers."""
        self.rests_until = 0.0
        """Not to be closed by a probe before this time (the caller's clock)."""
        self.last_error = ""

    @property
    def is_open(self) -> bool:
        """True while no request may go to the engine."""
        return self.state is CircuitState.OPEN

    def succeed(self) -> None:
        """A true answer: the engine works."""
        self.failures_in_row = self.untrue_in_row = self.num_exposed = 0

    def lie(self, error: str, now: float, *, is_last: bool) -> bool:
        """An untrue answer; True when it opens the circuit, which that of the last engine never does.

        One that was taken out before for this has one answer to prove itself.
        """
        self.untrue_in_row += 1
        self.last_error = error
        if is_last or self.is_open or self.untrue_in_row < (1 if self.num_exposed else self._max_untrue):
            return False
        rest_s = self._untrue_rest_s * 2.0 ** min(self.num_exposed, _MOST_DOUBLINGS)
        self.num_exposed += 1
        self.rests_until = now + rest_s
        return self.open(error)

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
        self.failures_in_row = self.untrue_in_row = 0


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

    def restart(self, allowed: int) -> None:
        """After an outage: begin small, so that a cold engine is not flooded."""
        self.allowed = min(self.capacity, allowed)
