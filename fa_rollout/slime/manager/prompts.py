"""Prompts on their way from slime's data source to the hub.

Invariant: prompts are taken by the thread that calls, in the order of the groups' numbers, and each is kept
until its group is delivered or is settled otherwise: what is kept is exactly what a restart must give again.
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
            encode_ids: the prompt's ids of a group whose samples share it; empty where slime must find them.
            first: pickled groups to be given before any new one.
        """
        self._data_source = data_source
        self._encode_ids = encode_ids
        self._first = deque(first)
        self._kept: dict[int, bytes] = {}
        self.num_taken = 0
        """Groups that got a number."""

    def take(self, num_groups: int) -> list[bytes]:
        """Payloads of the next groups; fewer where the data source gives fewer."""
        groups = [pickle.loads(self._first.popleft()) for _ in range(min(num_groups, len(self._first)))]
        if num_groups > len(groups):
            groups += self._data_source.get_samples(num_groups - len(groups))
        return [self._number(group) for group in groups]

    def _number(self, group: list[Any]) -> bytes:
        self._kept[self.num_taken] = pickle.dumps(group, pickle.HIGHEST_PROTOCOL)
        self.num_taken += 1
        return encode_prompt(self._kept[self.num_taken - 1], self._encode_ids(group))

    def settle(self, group: int) -> bytes:
        """The group is delivered, or gone for good; its prompts as they were taken."""
        return self._kept.pop(group)

    def outstanding(self) -> list[bytes]:
        """Prompts that were taken and not delivered, oldest first."""
        return [*self._kept.values(), *self._first]


class Stock:
    """How many prompts to feed beyond what the hub can use now: rejections between two calls open credits."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._rejections: deque[int] = deque([0], maxlen=ROUNDS_SEEN)

    def rejected(self) -> None:
        """A group was filtered."""
        self._rejections[-1] += 1

    def next_call(self) -> None:
        """A call of the rollout function begins."""
        self._rejections.append(0)

    @property
    def size(self) -> int:
        """Twice the most rejections of a call, of late."""
        return max(self._least, 2 * max(self._rejections))
