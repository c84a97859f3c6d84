"""Errors of the engine client: what a request, or a control call, can end in besides a result."""

from enum import StrEnum
from typing import ClassVar

from shm.errors import FaRolloutError


class FailureClass(StrEnum):
    """What kind of trouble a request ran into; the kind alone decides what is done about it."""

    TRANSIENT = "transient"
    """Connection refused, reset or dropped, 500, 502, 504, silence to the deadline: tried again elsewhere."""
    OVERLOAD = "overload"
    """503 or 429: tried again, and dispatch to that engine slows down."""
    PERMANENT = "permanent"
    """The engine refuses this very request: never tried again."""
    INVALID = "invalid"
    """An answer that breaks a rule of truth: never patched, never tried again in silence."""


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


class EngineOverloaded(RequestFailed):
    """Engines answered 503 or 429 until the attempts were used up."""

    failure: ClassVar[FailureClass] = FailureClass.OVERLOAD


class RequestTimedOut(RequestFailed, TimeoutError):
    """No answer within the deadline, on any attempt."""


class EngineUnavailable(ClientError, ConnectionError):
    """No engine can be used; the text names each engine and its last error."""


class ControlFailed(ClientError, RuntimeError):
    """A control call (pause, continue, update, abort) that an engine refused or did not answer."""


class EnginePaused(ControlFailed):
    """An engine that stands still, paused by somebody who alone may end that."""


class ControlRefused(ControlFailed):
    """A control call that was answered, with a refusal."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status
        """HTTP status."""
