r"""Escapes untrusted text (from an engine, a model, user code or a file) for display.

In: any text. Out: the same text with control and formatting characters escaped (`\x1b`, `\r`, `\u202e`).
Invariant: the result moves no cursor, adds no line breaks, changes no reading order, and can be encoded as
UTF-8.
"""

import json
import re

_ACTING = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # control characters: terminals obey ESC and, as one character, CSI (\x9b)
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # the reading order (Trojan Source, arXiv 2111.00169)
    "\u2028\u2029"  # line ends beside \n
    "\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # invisible text
    "\ud800-\udfff"  # lone surrogates, which UTF-8 cannot encode
    "]"
)
_ACTING_IN_LINES = re.compile(_ACTING.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def printable(text: str, *, lines: bool = False) -> str:
    """`text` on one line; `lines` keeps line ends and tabs."""
    return (_ACTING_IN_LINES if lines else _ACTING).sub(_escaped, text)


def printable_json(text: str) -> str:
    """Equivalent JSON that is safe to display."""
    return _ACTING_IN_LINES.sub(lambda match: json.dumps(match[0])[1:-1], text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
