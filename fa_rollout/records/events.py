"""A run's `events.jsonl`, read. In: the file, which a live run may still append to. Out: typed events.

Invariant: a line that is cut short, or of a kind that this release does not know, is passed over.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

FILE_NAME = "events.jsonl"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line; each kind of event has some of these. What else it has is for replay alone."""

    t: float
    """time.monotonic() of the host."""
    event: str
    run: str = ""
    time_s: float | None = None
    """Unix time, of `began`."""
    folder: str = ""
    """That paths of the configuration are relative to."""
    config: dict[str, Any] = {}
    lineage: str = ""
    group: int | None = None
    groups: list[int] = []
    attempts: list[int] = []
    attempt: int = 0
    reason: str = ""
    step: int | None = None
    version: int | None = None
    versions: tuple[int, int] | None = None
    bytes: int = 0
    prompt_lens: list[int] = []
    response_lens: list[int] = []
    rewards: list[float | None] = []
    """By sample; None for one that is not trained."""
    rank: int | None = None
    peer: int = 0
    waited_s: float = 0.0
    outcome: str = ""
    phase: str = ""
    bubble_s: float = 0.0
    number: int = 0
    dataset: str | None = None
    prompts: int = 0
    error: str | None = None
    text: str = ""
    incarnation: int = 0
    engines: list[str] = []
    concurrency: int = 0
    how: str = ""
    requeued: list[int] = []
    kept: list[int] = []
    unfinished: list[int] = []
    taken_back: list[int] = []
    exit_code: int | None = None
    counts: dict[str, int] = {}


def read(path: Path) -> Iterator[Event]:
    """Events in the order of their writing."""
    decoder = msgspec.json.Decoder(Event)
    with path.open("rb") as file:
        for line in file:
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError:
                continue
