"""Makes error texts safe to send to the hub: user code, files and engines may put anything into them."""

import traceback

_MAX_CHARS = 8000


def tellable(text: str) -> str:
    """The text as valid Unicode of limited length, for a message.

    Of a long text the start is kept, which names the error, and the end, where a traceback names its cause.
    """
    if len(text) > _MAX_CHARS:
        half = _MAX_CHARS // 2
        text = f"{text[:half]} [{len(text) - 2 * half} characters left out] {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def traced(error: BaseException) -> str:
    """Type, text and traceback of an exception, through `tellable`."""
    return tellable("".join(traceback.format_exception(error)).strip())
