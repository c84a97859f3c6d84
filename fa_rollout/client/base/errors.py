"""Errors of the engine client: what a request, or a control call, can end in besides a result."""

from enum import StrEnum
from typing import ClassVar

from shm.errors import FaRolloutError


class FailureClass(StrEnum):
    """What kind of trouble a request ran into; the kind alone decides what is done about it."""

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
        """Whether it says something of the server, and nothing of the request."""
        return self in (FailureClass.TRANSIENT, FailureClass.OVERLOAD)


class ClientError(FaRolloutError):
    """Root of the errors of the engine client."""


class RequestFailed(ClientError, RuntimeError):
    """A request that was given up; the text names engine, attempts and the last cause."""

    failure: ClassVar[FailureClass] = FailureClass.TRANSIENT


class RequestRefused(RequestFailed, ValueError):
    """The engine, or a check on this side, refuses the request for good."""

    failure: ClassVar[FailureClass] = FailureClass.PERMANENT


class InvalidReply(RequestFailed, ValueError):
    """An answer whose ids, log-probabilities or versions are missing, short, not finite or in conflict."""

    failure: ClassVar[FailureClass] = FailureClass.INVALID


class RequestTimedOut(RequestFailed, TimeoutError):
    """No answer within the deadline, on any attempt."""

    failure: ClassVar[FailureClass] = FailureClass.SILENCE


class EngineUnavailable(ClientError, ConnectionError):
    """No engine answers; the text names each engine and its last error. No request is to blame for it."""


class AnswerTooLong(ClientError, ValueError):
    """An answer is longer than any true one could be."""


class ControlFailed(ClientError, RuntimeError):
    """A control call (pause, continue, update, abort) that an engine refused or did not answer."""

    @property
    def may_pass(self) -> bool:
        """Whether the same call may be accepted later."""
        return True


class ControlUnanswered(ControlFailed):
    """A control call without an answer in time: nobody knows whether it was carried out."""


class EnginePaused(ControlFailed):
    """An engine that stands still, paused by somebody who alone may end that."""


class KeyRefused(ControlFailed):
    """An engine wants another key than it was given; waiting does not help."""


class ControlRefused(ControlFailed):
    """A control call that was answered, with a refusal."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status
        """HTTP status."""

    @property
    def may_pass(self) -> bool:
        """True of an overload or a fault of the server, which says nothing against the call."""
        return self.status >= 500 or self.status in (408, 429)


class NotDone(ControlRefused):
    """A control call that the engine says it has carried out, and has not."""

    @property
    def may_pass(self) -> bool:
        """It may be carried out the next time."""
        return True


class EngineTaken(ClientError, RuntimeError):
    """An engine that this run gives its weights reports weights of another run."""
