"""Prompts on their way from slime's data source to the hub.

Invariant: prompts are taken on the calling thread, in the order of the groups' numbers, and each is kept
until its group is delivered or settled: the kept prompts are exactly those that a restart must repeat.
"""

import pickle
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from fa_rollout.slime.wire import encode_prompt

ROUNDS_SEEN = 4
"""Calls over which rejections are remembered."""


class Prompts:
    """Groups by their number in the run."""

    def __init__(
        self, data_source: Any, *, encode_ids: Callable[[list[Any]], list[int]], first: Iterable[bytes] = ()
    ) -> None:
        """
        Args:
            encode_ids: ids of the prompt that a group's samples share; empty if slime must encode it.
            first: pickled groups to deliver before any new group.
        """
        self._data_source = data_source
        self._encode_ids = encode_ids
        self._first = deque(first)
        self._kept: dict[int, bytes] = {}
        self.num_taken = 0
        """Groups that got a number."""

    def take(self, num_groups: int) -> list[bytes]:
        """Payloads of the next groups; fewer if the data source returns fewer."""
        groups = [pickle.loads(self._first.popleft()) for _ in range(min(num_groups, len(self._first)))]
        if num_groups > len(groups):
            groups += self._data_source.get_samples(num_groups - len(groups))
        return [self._number(group) for group in groups]

    def _number(self, group: list[Any]) -> bytes:
        self._kept[self.num_taken] = pickle.dumps(group, pickle.HIGHEST_PROTOCOL)
        self.num_taken += 1
        return encode_prompt(self._kept[self.num_taken - 1], self._encode_ids(group))

    def settle(self, group: int) -> bytes:
        """Drop a group that was delivered or settled; returns its prompts as they were taken."""
        return self._kept.pop(group)

    def outstanding(self) -> list[bytes]:
        """Prompts that were taken and not delivered, oldest first."""
        return [*self._kept.values(), *self._first]


class Stock:
    """How many surplus prompts to feed: the hub replaces rejected groups between two calls."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._rejections: deque[int] = deque([0], maxlen=ROUNDS_SEEN)

    def rejected(self) -> None:
        """A group was filtered."""
        self._rejections[-1] += 1

    def next_call(self) -> None:
        """A call of the rollout function starts."""
        self._rejections.append(0)

    @property
    def size(self) -> int:
        """Twice the most rejections in one of the last calls."""
        return max(self._least, 2 * max(self._rejections))
