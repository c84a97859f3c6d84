"""The run's event log, `events.jsonl`, read.

In: the file that the hub writes. Out: its events. Invariant: a line that is cut short, or whose event is
unknown, is skipped.
"""

from collections.abc import Iterator
from functools import reduce
from operator import or_
from pathlib import Path

import msgspec

from fa_rollout.account.events import Event

FILE_NAME = "events.jsonl"


def kinds() -> list[type[Event]]:
    """Every event that a log can hold."""
    found, todo = [], [Event]
    while todo:
        kind = todo.pop()
        subclasses = kind.__subclasses__()
        todo += subclasses
        found += [] if subclasses else [kind]
    return found


def read(path: Path) -> Iterator[Event]:
    """Events in the order of their writing; the file may still grow."""
    decoder = msgspec.json.Decoder(reduce(or_, kinds()))
    with path.open("rb") as file:
        for line in file:
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError:
                continue
