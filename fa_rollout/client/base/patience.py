"""How long a server's condition is borne: pure bookkeeping, on a given clock.

Overload, server errors and lost connections say nothing of the request that met them, so no number of them
gives it up. Time does, and who else was answered meanwhile says what is at fault:

| for the limit, this request | and others | the fault is |
|---|---|---|
| was refused, again and again | were not answered either | the server's |
| was refused, again and again | were answered | the request's |
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum

_TRIES, _ANSWERED, _LEAST_S = 8, 64, 60.0
"""A request that makes a server fail (500) so often, for so long, while so many others are answered, is given
up before the limit."""


class Blame(StrEnum):
    """What is at fault once patience ends."""

    NOBODY = "nobody"
    """It has not ended."""
    SERVER = "server"
    REQUEST = "request"


@dataclass(slots=True, kw_only=True, eq=False)
class Trouble:
    """The failures that one request has met, none of which is its own.

    Open from a failure until `end`; the listener of the context that it began in learns of both.
    """

    since_s: float
    last_s: float
    num_answered: int
    """Requests that were answered before the first of them."""
    num_failures: int = 0
    _listener: "TroubleListener | None" = field(default_factory=lambda: TROUBLE_LISTENER.get())

    def begin(self) -> None:
        """The request waits for a server that does not serve it."""
        if self._listener is not None:
            self._listener(self, True)

    def end(self) -> None:
        """The request was answered, was given up, or met a failure of its own; idempotent."""
        if self._listener is not None:
            self._listener(self, False)


TroubleListener = Callable[[Trouble, bool], None]

TROUBLE_LISTENER: ContextVar[TroubleListener | None] = ContextVar("TROUBLE_LISTENER", default=None)
"""Learns of the troubles of all requests that are sent in this context: those of one group."""


class Patience:
    """The answers of a server, or of all engines together."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._num_answered = 0
        self._answered_s = float("-inf")
        self._is_tried = False
        self.on_change: Callable[[bool], None] = lambda is_tried: None
        """Told True by the first failure, and False by the next true answer."""

    def answered(self, now_s: float) -> None:
        """A request was answered truly."""
        self._num_answered += 1
        self._answered_s = now_s
        if self._is_tried:
            self._is_tried = False
            self.on_change(False)

    def met(self, trouble: Trouble | None, now_s: float) -> Trouble:
        """A request met a failure that is not its own; `trouble` is what it met before."""
        if not self._is_tried:
            self._is_tried = True
            self.on_change(True)
        # One that was at work for so long in between was not refused all the time.
        if trouble is None or now_s - trouble.last_s > max(_LEAST_S, self.limit_s / 2):
            if trouble is not None:
                trouble.end()
            trouble = Trouble(since_s=now_s, last_s=now_s, num_answered=self._num_answered)
        trouble.num_failures += 1
        trouble.last_s = now_s
        trouble.begin()
        return trouble

    def blame(self, trouble: Trouble, now_s: float, *, is_suspect: bool) -> Blame:
        """Who is at fault; `is_suspect`: such a failure may come from the request, as a 500 may."""
        if now_s - max(trouble.since_s, self._answered_s) >= self.limit_s:
            return Blame.SERVER
        lasts_s, num_others = now_s - trouble.since_s, self._num_answered - trouble.num_answered
        is_odd = is_suspect and trouble.num_failures >= _TRIES and num_others >= _ANSWERED
        limit_s = min(_LEAST_S, self.limit_s) if is_odd else self.limit_s
        return Blame.REQUEST if lasts_s >= limit_s else Blame.NOBODY
