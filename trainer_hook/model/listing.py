"""Lists in messages: the first few, and how many more."""

from collections.abc import Sequence

_SHOWN = 3


def some(names: Sequence[str]) -> str:
    """The first names of a list, in words."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
