"""What becomes of user code that gives no result: one line that says what and where, then the traceback."""

import asyncio
import traceback

from fa_rollout.user_code import place
from shm.errors import FaRolloutError

_MAX_LINE = 400
_MAX_TRACEBACK = 8000


class UserCodeFailed(FaRolloutError, RuntimeError):
    """User code gave no result. The first line: what ran, what went wrong, and where; then the traceback."""

    @property
    def summary(self) -> str:
        """The first line."""
        return str(self).partition("\n")[0]

    @property
    def without_what(self) -> str:
        """The text behind the kind of user code that it begins with."""
        return str(self).partition(": ")[2]


class UserCodeTimedOut(UserCodeFailed):
    """User code did not return in its time; of `without_what` the rule and the place alone."""

    @property
    def without_what(self) -> str:
        return super().without_what.removeprefix("timeout: ")


def told(error: BaseException) -> str:
    """An exception in one line, with its place, and its traceback in the lines below."""
    text = "".join(traceback.format_exception(error)).rstrip()
    return f"{in_one_line(error)}{place.in_words(place.of_error(error))}\n{text[-_MAX_TRACEBACK:]}"


def in_one_line(error: BaseException) -> str:
    """Type and text of an exception."""
    error = place.first_of(error)
    if isinstance(error, asyncio.CancelledError) and not error.args:
        return "CancelledError: it was cancelled, and the run did not ask for that"
    try:
        text = " ".join(str(error).split())
    except Exception:  # a `__str__` of the user's own
        text = "its text cannot be shown"
    name = type(error).__name__
    return f"{name}: {text}"[:_MAX_LINE] if text else name


def failed(what: str, error: BaseException) -> UserCodeFailed:
    """The failure of `what` by an exception that it raised."""
    if isinstance(error, UserCodeFailed):
        return error
    return UserCodeFailed(f"{what}: {told(error)}")
