"""Reasons why groups are lost, by their kinds."""

import re

_KIND_LENGTH = 60
_TWO_WORDS = ("generate", "reward", "filter", "slime", "raised")
"""Reasons whose kind is told by the word behind the first colon."""


def kind_of(reason: str) -> str:
    """The first words, the same for all reasons of one kind."""
    words = reason.split(":")
    head = ":".join(words[:2]) if words[0] in _TWO_WORDS and len(words) > 1 else words[0]
    return re.sub(r"\d+", "N", " ".join(head.split()))[:_KIND_LENGTH] or "unknown"
