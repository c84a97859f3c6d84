"""An error that an engine tells under HTTP status 200: as an object or as a finish reason.

In: decoded JSON. Out: a `ServerVerdict` with the status that it stands for, or None.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa_rollout.client.wire.completion import Completion

_FIRST_ERROR, _LAST_ERROR = 400, 599


class ServerVerdict(Exception):
    """The engine does not answer this request; the status says whether another try makes sense."""

    def __init__(self, status: int | None, text: str, completion: "Completion | None" = None) -> None:
        super().__init__(text if status is None else f"{status} {text}")
        self.status = status
        """None: it tells none."""
        self.text = text
        self.completion = completion
        """The true tokens that were made before."""


def verdict_of(tree: Any) -> ServerVerdict | None:
    """The error that an object tells, by `error` (an object or a text) or by `"object": "error"`."""
    if not isinstance(tree, dict):
        return None
    error = tree if tree.get("object") == "error" else tree.get("error")
    if not error:
        return None
    if not isinstance(error, dict):
        error = {"message": error}
    message = error.get("message")
    return ServerVerdict(status_of(error.get("code")), str(error if message is None else message)[:500])


def status_of(code: Any) -> int | None:
    """The HTTP status of an error, from a number or its text."""
    text = str(code)
    number = int(text) if text.isascii() and text.isdecimal() and len(text) == 3 else 0
    return number if _FIRST_ERROR <= number <= _LAST_ERROR else None
