"""Errors of the engine client, for requests and control calls."""

from enum import StrEnum
from typing import ClassVar

from shm.errors import FaRolloutError


class FailureClass(StrEnum):
    """The kind of a request's failure, which decides whether and where it is retried."""

    TRANSIENT = "transient"
    """Connection refused, reset or dropped, 500, 502, 504: the engine's condition, waited out in time."""
    OVERLOAD = "overload"
    """503 or 429: the same, and dispatch to that engine slows down."""
    SILENCE = "silence"
    """No answer to the deadline of one request: tried again elsewhere, a few times."""
    PERMANENT = "permanent"
    """The engine refuses this very request: never tried again."""
    INVALID = "invalid"
    """An answer that breaks a rule of truth: never patched; another engine is asked once."""

    @property
    def is_condition(self) -> bool:
        """Whether it is the server's condition and not the request's fault."""
        return self in (FailureClass.TRANSIENT, FailureClass.OVERLOAD)


class ClientError(FaRolloutError):
    """Base class of the engine client's errors."""


class RequestFailed(ClientError, RuntimeError):
    """A request that was given up; the text names engine, attempts and the last cause."""

    failure: ClassVar[FailureClass] = FailureClass.TRANSIENT


class RequestRefused(RequestFailed, ValueError):
    """The engine, or a check before sending, refused the request permanently."""

    failure: ClassVar[FailureClass] = FailureClass.PERMANENT


class InvalidReply(RequestFailed, ValueError):
    """A reply whose ids, log-probabilities or versions are missing, short, not finite or contradictory."""

    failure: ClassVar[FailureClass] = FailureClass.INVALID


class RequestTimedOut(RequestFailed, TimeoutError):
    """No answer within the deadline, on any attempt."""

    failure: ClassVar[FailureClass] = FailureClass.SILENCE


class EngineUnavailable(ClientError, ConnectionError):
    """No engine answers, through no fault of the request; the text names each engine and its last error."""


class AnswerTooLong(ClientError, ValueError):
    """A reply is longer than any valid reply could be."""


class ControlFailed(ClientError, RuntimeError):
    """A control call (pause, continue, update, abort) that an engine refused or did not answer."""

    @property
    def may_pass(self) -> bool:
        """Whether a retry of the same call may succeed."""
        return True


class ControlUnanswered(ControlFailed):
    """A control call was not answered in time; whether it took effect is unknown."""


class EnginePaused(ControlFailed):
    """The engine was paused by another client, which must continue it."""


class KeyRefused(ControlFailed):
    """The engine refused the API key; a retry does not help."""


class ControlRefused(ControlFailed):
    """The engine answered a control call with a refusal."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status
        """HTTP status."""

    @property
    def may_pass(self) -> bool:
        """True for an overload or a server error: the call itself is valid."""
        return self.status >= 500 or self.status in (408, 429)


class NotDone(ControlRefused):
    """The engine reported success of a control call that had no effect."""

    @property
    def may_pass(self) -> bool:
        """A retry may succeed."""
        return True


class EngineTaken(ClientError, RuntimeError):
    """An engine of this run reports weights of another run."""
