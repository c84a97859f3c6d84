"""Text of errors on its way to the hub: user code, files and engines put anything into it."""

import traceback

_MAX_CHARS = 8000


def tellable(text: str) -> str:
    """The text as a message can carry it: valid Unicode, and so long that nobody is held up by it.

    Of a long one the start is kept, which says what it is, and the end, where a traceback names its cause.
    """
    if len(text) > _MAX_CHARS:
        half = _MAX_CHARS // 2
        text = f"{text[:half]} [{len(text) - 2 * half} characters left out] {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def traced(error: BaseException) -> str:
    """Type, text and traceback, tellable."""
    return tellable("".join(traceback.format_exception(error)).strip())
