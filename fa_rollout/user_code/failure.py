"""Errors of user code: one line with the error and its place, then the traceback."""

import asyncio
import traceback

from fa_rollout.user_code import place
from shm.errors import FaRolloutError

_MAX_LINE = 400
_MAX_TRACEBACK = 8000


class UserCodeFailed(FaRolloutError, RuntimeError):
    """User code did not return a result. First line: what ran, the error, its place; then the traceback."""

    @property
    def summary(self) -> str:
        """The first line."""
        return str(self).partition("\n")[0]

    @property
    def without_what(self) -> str:
        """The text without the leading kind of user code."""
        return str(self).partition(": ")[2]


class UserCodeTimedOut(UserCodeFailed):
    """User code exceeded its time limit; `without_what` is the rule and the place only."""

    @property
    def without_what(self) -> str:
        return super().without_what.removeprefix("timeout: ")


def told(error: BaseException) -> str:
    """An exception and its place in one line, followed by its traceback."""
    text = "".join(traceback.format_exception(error)).rstrip()
    return f"{in_one_line(error)}{place.in_words(place.of_error(error))}\n{text[-_MAX_TRACEBACK:]}"


def in_one_line(error: BaseException) -> str:
    """Type and text of an exception."""
    error = place.first_of(error)
    if isinstance(error, asyncio.CancelledError) and not error.args:
        return "CancelledError: it was cancelled, but not by the run"
    try:
        text = " ".join(str(error).split())
    except Exception:  # a user-defined `__str__` can fail
        text = "(its __str__ failed)"
    name = type(error).__name__
    return f"{name}: {text}"[:_MAX_LINE] if text else name


def failed(what: str, error: BaseException) -> UserCodeFailed:
    """The `UserCodeFailed` for an exception raised by `what`."""
    if isinstance(error, UserCodeFailed):
        return error
    return UserCodeFailed(f"{what}: {told(error)}")
