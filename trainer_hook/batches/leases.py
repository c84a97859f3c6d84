"""Which records of the ring this process still looks at.

In: the groups of each batch. Out: the records that no view is left of, to be told to the hub.

Invariant: every hand-over of a record is given back once, after the last view of it died. The callback of a
dying view runs in any thread at any moment, so it does nothing but append to a deque.
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
    """Records between hand-over and return."""

    def __init__(self) -> None:
        self._dead: deque[tuple[int, int]] = deque()
        """(step, sequence) of each hand-over that ended."""
        self._returned: dict[int, list[int]] = {}
        """The same by step, not told to the hub yet."""
        self._memories: list[weakref.ref[npt.NDArray[np.uint8]]] = []
        self._num_held = 0

    def add(self, step: int, groups: Sequence[Group]) -> None:
        """Watch the records of a batch."""
        self._num_held += len(groups)
        self._memories = [memory for memory in self._memories if memory() is not None]
        self._memories += [group.memory for group in groups if group.memory is not None]
        for group in groups:
            group.on_release(partial(self._note, step))

    def _note(self, step: int, sequence: int) -> None:
        self._dead.append((step, sequence))

    def take_returned(self) -> dict[int, list[int]]:
        """Records that became free and were not taken yet, by step."""
        self._collect()
        returned, self._returned = self._returned, {}
        return returned

    def take_returned_of(self, step: int) -> list[int]:
        """Those of one step."""
        self._collect()
        return self._returned.pop(step, [])

    def keep_views(self) -> None:
        """Give the views that live memory of their own, before their records go back all the same.

        Raises:
            OSError: there is no memory for it.
        """
        for memory in self._memories:
            base = memory()
            if base is not None:
                make_private(base.ctypes.data, base.size)

    @property
    def num_held(self) -> int:
        """Records that something still maps, the open batch's included."""
        self._collect()
        return self._num_held

    def _collect(self) -> None:
        while self._dead:
            step, sequence = self._dead.popleft()
            self._num_held -= 1
            self._returned.setdefault(step, []).append(sequence)
