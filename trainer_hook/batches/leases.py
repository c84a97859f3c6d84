"""Leases: the ring records that this process still views.

In: the groups of each batch. Out: the records without views, to report to the hub.

Invariant: every lease is released exactly once, after the last view of its record is freed. The release
callback can run in any thread at any time, so it only appends to a deque.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from shm.ring.private import make_private
from trainer_hook.batches.group import Group


class Leases:
    """Records that were delivered and are not released yet."""

    def __init__(self) -> None:
        self._dead: deque[tuple[int, int]] = deque()
        """(step, sequence) of each lease that ended."""
        self._returned: dict[int, list[int]] = {}
        """Released sequences by step, not reported to the hub yet."""
        self._memories: list[weakref.ref[npt.NDArray[np.uint8]]] = []
        self._num_held = 0

    def add(self, step: int, groups: Sequence[Group]) -> None:
        """Track the records of a batch."""
        self._num_held += len(groups)
        self._memories = [memory for memory in self._memories if memory() is not None]
        self._memories += [group.memory for group in groups if group.memory is not None]
        for group in groups:
            group.on_release(partial(self._note, step))

    def _note(self, step: int, sequence: int) -> None:
        self._dead.append((step, sequence))

    def take_returned(self) -> dict[int, list[int]]:
        """Records released since the last call, by step."""
        self._collect()
        returned, self._returned = self._returned, {}
        return returned

    def take_returned_of(self, step: int) -> list[int]:
        """Released records of one step."""
        self._collect()
        return self._returned.pop(step, [])

    def keep_views(self) -> None:
        """Copy live views to private memory, so that their records can be released.

        Raises:
            OSError: out of memory.
        """
        for memory in self._memories:
            base = memory()
            if base is not None:
                make_private(base.ctypes.data, base.size)

    @property
    def num_held(self) -> int:
        """Number of records that are still mapped, including those of the open batch."""
        self._collect()
        return self._num_held

    def _collect(self) -> None:
        while self._dead:
            step, sequence = self._dead.popleft()
            self._num_held -= 1
            self._returned.setdefault(step, []).append(sequence)
