"""Figures of each step of the demo's trainer: one JSON line, written by rank 0, read by the view.

In: figures of a step. Out: the same. Invariant: a line is read only when it is whole.
"""

from pathlib import Path

import msgspec

from fa_rollout.process.private_files import append_private


class DemoStep(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step."""

    step: int
    reward: float
    """Mean over all samples of the step."""
    entropy: float
    """Of the policy, in nats per token."""
    staleness: int | None
    """Version that trains the step minus the oldest version among its tokens; None: not reported."""
    idle: float
    """Share of time since the first batch that the trainer waited for data."""
    tokens_per_s: float
    """Response tokens that went through generation, reward and training, since the step before."""
    ring_fill: float
    """Share of the ring between tail and head."""
    example: str
    """One prompt and its answer."""


class FiguresLog:
    """Appends lines; use it on one rank."""

    def __init__(self, path: Path) -> None:
        self._file = append_private(path)

    def write(self, figures: DemoStep) -> None:
        self._file.write(msgspec.json.encode(figures) + b"\n")

    def close(self) -> None:
        self._file.close()


class FiguresReader:
    """Reads what was appended since the last call; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self) -> list[DemoStep]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._position += len(whole)
        return [msgspec.json.decode(line, type=DemoStep) for line in whole.splitlines()]
