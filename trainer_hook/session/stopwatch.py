"""Trainer time: waiting for batches, and everything else.

Invariant: after the first request, every second counts once, as waiting or as training.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Total time inside and outside waits."""

    def __init__(self) -> None:
        self.first_wait_s = 0.0
        self.wait_s = 0.0
        self.update_s = 0.0
        self.bubble_s = 0.0
        self._began_s: float | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time a wait for a batch."""
        start_s = time.monotonic()
        is_first = self._began_s is None
        self._began_s = start_s if self._began_s is None else self._began_s
        try:
            yield
        finally:
            spent_s = time.monotonic() - start_s
            self.wait_s += spent_s
            if is_first:
                self.first_wait_s = spent_s

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Time a part of a weight update."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.update_s += time.monotonic() - start_s

    def figures(self) -> dict[str, float]:
        """All totals, in seconds."""
        names = ("first_wait_s", "wait_s", "train_s", "update_s", "bubble_s")
        return {name: getattr(self, name) for name in names}

    @property
    def train_s(self) -> float:
        """Time since the first request, without waits for a batch."""
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s - self.wait_s
