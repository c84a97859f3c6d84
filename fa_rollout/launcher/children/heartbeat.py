"""Whether a process that lives also answers: a stopped one, or one that hangs, has no other sign.

In: the moments at which this process looks, and each answer. Out: when to ask, and how long nothing came.
Invariant: time in which this process itself did not look is not held against the other one, since whatever
stopped this one (a debugger, a machine that slept) may have stopped both.
"""

_ASK_EVERY_S = 1.0
_LONGEST_LOOK_S = 1.0
"""Between two looks; what is beyond that was not spent waiting."""


class Heartbeat:
    """One peer's silence, counted from its first sign of life."""

    def __init__(self) -> None:
        self.silent_s = 0.0
        """For how long it owes an answer."""
        self._looked_s: float | None = None
        self._asked_s: float | None = None
        self._is_owed = False

    def is_due(self, now_s: float) -> bool:
        """Called at each look: counts the silence, and tells whether to ask now."""
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
        """It answered."""
        self.silent_s, self._is_owed = 0.0, False
