"""Detects a process that is alive but hangs or is stopped, by pings it does not answer.

In: the times at which this process polls, and each answer. Out: when to ping, and how long the peer has been
silent. Invariant: time in which this process itself did not poll does not count, since whatever stopped it (a
debugger, a suspended machine) may have stopped both.
"""

_ASK_EVERY_S = 1.0
_LONGEST_LOOK_S = 1.0
"""Longest time that counts between two polls."""


class Heartbeat:
    """How long one peer has not answered."""

    def __init__(self) -> None:
        self.silent_s = 0.0
        """Time since the unanswered ping."""
        self._looked_s: float | None = None
        self._asked_s: float | None = None
        self._is_owed = False

    def is_due(self, now_s: float) -> bool:
        """Called at each poll: counts the silence, and returns whether to ping now."""
        passed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        if self._is_owed:
            self.silent_s += min(passed_s, _LONGEST_LOOK_S)
            return False
        if self._asked_s is not None and now_s - self._asked_s < _ASK_EVERY_S:
            return False
        self._asked_s, self._is_owed = now_s, True
        return True

    def answered(self) -> None:
        """The peer answered the ping."""
        self.silent_s, self._is_owed = 0.0, False
