"""An engine's own book of its answers, on disk: what was sampled, whatever a fault then makes of the answer.

One JSON line an answer, written before the answer is sent. A line survives the engine's death, so a checker
can ask of every token that was trained which engine sampled it, under which weights.
"""

import os
from typing import Any

import msgspec

from tests.kit.scripted.job import Job


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    rid: str
    prompt_tokens: int
    key: int
    """Of the sequence, as `oracle.sequence_key` makes it."""
    spans: list[tuple[str, int]]
    """(label of the weights, end) of its tokens."""
    answer: msgspec.Raw
    """As it was before a fault changed it."""


class Journal:
    """Appends to a file."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, job: Job, spans: list[tuple[str, int]], answer: bytes) -> None:
        """One answer, in one write."""
        entry: dict[str, Any] = {
            "rid": job.rid,
            "prompt_tokens": job.prompt_tokens,
            "key": job.key,
            "spans": spans,
            "answer": msgspec.Raw(answer),
        }
        os.write(self._file, msgspec.json.encode(entry) + b"\n")

    def close(self) -> None:
        """Write no more."""
        os.close(self._file)
