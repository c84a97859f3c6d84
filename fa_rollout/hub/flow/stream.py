"""The stream of prompts: what a group id stands for. Pure.

In: a group id. Out: its epoch and its row of the data. Invariant: one id means one place in the data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt


class StreamEnd(StrEnum):
    """How a group is settled."""

    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    DROPPED = "dropped"


class Source(Protocol):
    """Where group ids get their prompts from."""

    @property
    def length(self) -> int | None:
        """Groups in all, as far as known; None when there is no end."""

    @property
    def is_open(self) -> bool:
        """Whether `length` may still grow."""

    @property
    def description(self) -> str:
        """What group ids mean here: equal for equal data in an equal order; empty where nobody can say."""

    def locate(self, group: int) -> tuple[int, int]:
        """(epoch, row of the data) of a group."""

    def settled(self, group: int, end: StreamEnd) -> None:
        """The group will not be issued again."""


@dataclass(slots=True, kw_only=True)
class Stream:
    """The endless stream of prompts: group ids count through epochs of one shuffled order each."""

    num_prompts: int
    epochs: int | None
    order: Callable[[int], npt.NDArray[np.int64]]
    """Epoch to the order of its rows."""
    shard: int = 0
    num_shards: int = 1
    """This stream has every `num_shards`-th position of the whole one, from `shard` on."""
    description: str = ""
    is_open: bool = False
    _order: tuple[int, npt.NDArray[np.int64]] | None = None

    @property
    def length(self) -> int | None:
        """Groups in all; None when the data wraps around for ever."""
        if self.epochs is None:
            return None
        return -(-(self.epochs * self.num_prompts - self.shard) // self.num_shards)

    def locate(self, group: int) -> tuple[int, int]:
        """(epoch, row of the data) of a group."""
        epoch, position = divmod(group * self.num_shards + self.shard, self.num_prompts)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self.order(epoch))
        return epoch, int(self._order[1][position])

    def settled(self, group: int, end: StreamEnd) -> None:
        """Rows stay where they are."""
