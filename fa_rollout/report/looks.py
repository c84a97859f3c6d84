"""What the run's metrics saw, look by look. In: `metrics.jsonl`, if there is one. Out: snapshots.

Invariant: the report needs no metrics; a line of another release is passed over.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from fa_rollout.account.bound import Holds, holds_of
from fa_rollout.account.snapshot import EngineState, Snapshot

FILE_NAME = "metrics.jsonl"


def looks(folder: Path, run: str) -> Iterator[Snapshot]:
    """The snapshots of one run, oldest first."""
    path = folder / FILE_NAME
    if not path.is_file():
        return
    decoder = msgspec.json.Decoder(Snapshot)
    with path.open("rb") as file:
        for line in file:
            try:
                now = decoder.decode(line)
            except msgspec.DecodeError:
                continue
            if now.run.name == run:
                yield now


def seen(folder: Path, run: str) -> tuple[Holds, list[EngineState]]:
    """What held generation back, from the first trained step on; and the engines as the last look with any of
    them tells."""
    engines: list[EngineState] = []

    def trained() -> Iterator[Snapshot]:
        nonlocal engines
        for now in looks(folder, run):
            engines = now.engines or engines
            if now.totals.steps:
                yield now

    holds = holds_of(trained())
    return holds, engines
