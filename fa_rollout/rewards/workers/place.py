"""Where reward workers live and end, and the decisions about them: when to take back, to replace, to give up.

Decisions are pure functions of figures; the pool carries them out.
"""

import time
from dataclasses import dataclass, field
from enum import StrEnum

from fa_rollout.rewards.outcomes import FailureReason, RewardFailed
from fa_rollout.rewards.workers.item import Item
from fa_rollout.rewards.workers.process import WorkerProcess
from fa_rollout.rewards.workers.protocol import Done

SLOW_S = 0.02
"""An item that runs longer than this keeps no others waiting behind it."""
MAX_WINDOW = 16
START_TIMEOUT_S = 180.0
MAX_DEATHS = 2
"""Workers that may die on an item before it counts as failed."""
MAX_BACKOFF_S = 5.0


class WorkerVerdict(StrEnum):
    """What a live worker needs."""

    FINE = "fine"
    BEHIND = "behind"
    """Its item is slow: those it has not begun go to others."""
    OVERDUE = "overdue"
    """Its item ran out of time: the worker must end."""
    NOT_LOADED = "not_loaded"
    """It has not loaded the function in time."""


def judge(ready: bool, num_held: int, *, running_s: float, timeout_s: float) -> WorkerVerdict:
    """What a worker needs that has been on its item, or on its start, for `running_s`."""
    if not ready:
        return WorkerVerdict.NOT_LOADED if running_s > START_TIMEOUT_S else WorkerVerdict.FINE
    if num_held and running_s > timeout_s:
        return WorkerVerdict.OVERDUE
    return WorkerVerdict.BEHIND if num_held > 1 and running_s > SLOW_S else WorkerVerdict.FINE


def next_window(window: int, elapsed_s: float) -> int:
    """Items that a worker may hold after one took `elapsed_s`: as many as keep it busy, and no more."""
    if elapsed_s > SLOW_S:
        return 1
    return min(2 * window, MAX_WINDOW) if elapsed_s < SLOW_S / 4 else window


def backoff_s(num_deaths: int) -> float:
    """Wait before the next worker, after so many deaths in a row before the latest."""
    return 0.0 if not num_deaths else min(0.1 * 2.0 ** (num_deaths - 1), MAX_BACKOFF_S)


@dataclass(slots=True, eq=False)
class WorkerPlace:
    """Where a worker lives; when it dies the next one moves in."""

    process: WorkerProcess | None = None
    ready: bool = False
    items: dict[int, Item] = field(default_factory=dict)
    """What the worker holds, by ticket, in the order of sending: it is on the first."""
    since_s: float = 0.0
    """When it began the one it is on; until it is ready, when it was started."""
    window: int = 1
    """Items it may hold."""
    num_deaths: int = 0
    """In a row: no item has been finished since."""
    num_failed_starts: int = 0
    """In a row: no worker has loaded the function since."""
    start_at_s: float = 0.0
    """When the next worker may move in."""

    def has_room(self) -> bool:
        return self.ready and len(self.items) < self.window

    def back_off(self, now_s: float) -> None:
        """Note a death: the next worker waits the longer, the more there were in a row."""
        self.start_at_s = now_s + backoff_s(self.num_deaths)
        self.num_deaths += 1

    def take_in(self, item: Item) -> None:
        """Note an item that was sent to the worker."""
        item.payload = b""
        if not self.items:
            self.since_s = time.monotonic()
        self.items[item.ticket] = item

    def take_away(self) -> dict[int, Item]:
        """Empty the place; what the worker held is the caller's."""
        items, self.items = self.items, {}
        self.process, self.ready, self.window = None, False, 1
        return items


@dataclass(slots=True, eq=False)
class WorkerEnding:
    """A killed worker until it is reaped, and what it held."""

    process: WorkerProcess
    items: dict[int, Item]
    cause: str
    overdue: Item | None = None
    """The item that ran too long; None where the worker died by itself."""

    def settle(self, timeout_s: float) -> list[Item]:
        """Finish what ended with the worker, once it is gone; what is returned is to be tried again.

        Answers that it sent before its end count. Of the others it was on one, and had not begun the rest.
        """
        for ticket, answer in self.process.receive():
            if isinstance(answer, Done) and ticket in self.items:
                self.items.pop(ticket).finish(answer.outcomes)
        again = [self.items.pop(ticket) for ticket in self.process.take_back() if ticket in self.items]
        for item in self.items.values():
            failure = self._failure_of(item, timeout_s)
            if failure is None:
                again.append(item)
            else:
                item.finish(failure)
        return again

    def _failure_of(self, item: Item, timeout_s: float) -> RewardFailed | None:
        """How the item ends that the worker was on; None: it is tried again."""
        if item is self.overdue:
            text = f"the reward ran longer than reward.timeout_s = {timeout_s:g} s; its worker was killed"
            if (at := self.process.last_place()) is not None:
                text += f"; it was at {at}"
            return RewardFailed(reason=FailureReason.TIMEOUT, text=text)
        if self.overdue is None:
            item.num_deaths += 1
        if item.num_deaths < MAX_DEATHS:
            return None
        text = f"the worker process died on this sample {MAX_DEATHS} times, the last time with {self.cause}"
        return RewardFailed(reason=FailureReason.WORKER_DIED, text=text)
