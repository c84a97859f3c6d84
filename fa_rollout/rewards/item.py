"""The books of a pool: what a score waits for, and the calls that it is made of."""

import asyncio
from dataclasses import dataclass, field

from fa_rollout.rewards.outcomes import Outcomes, RewardFailed, RewardOutcome
from fa_rollout.rewards.process import WorkerProcess


@dataclass(slots=True, eq=False)
class Job:
    """One group to be scored."""

    outcomes: list[RewardOutcome | None]
    future: asyncio.Future[None]
    """Done when every outcome is there."""
    num_left: int

    def deliver(self, first: int, outcomes: list[RewardOutcome]) -> None:
        self.outcomes[first : first + len(outcomes)] = outcomes
        self.num_left -= len(outcomes)
        if not self.num_left and not self.future.done():
            self.future.set_result(None)


@dataclass(slots=True, eq=False)
class Item:
    """One call of the user's function; it ends in exactly one `finish`."""

    ticket: int
    """Rises with age: a smaller one came first."""
    job: Job
    first: int
    """Index in the job of the first of its samples."""
    num_samples: int
    payload: bytes
    num_deaths: int = 0
    """Workers that died on it."""

    def finish(self, outcomes: Outcomes) -> None:
        if isinstance(outcomes, RewardFailed):
            outcomes = [outcomes] * self.num_samples
        self.job.deliver(self.first, outcomes)


@dataclass(slots=True, eq=False)
class Place:
    """Where a worker lives; when it dies the next one moves in."""

    process: WorkerProcess | None = None
    ready: bool = False
    items: dict[int, Item] = field(default_factory=dict)
    """What the worker holds, by ticket, in the order of sending: it is on the first."""
    since_s: float = 0.0
    """When it began the one it is on; until it is ready, when it was started."""
    window: int = 1
    """Items it may hold; grows while they are quick."""
    num_deaths: int = 0
    """In a row: neither a start nor an item has succeeded since."""
    start_at_s: float = 0.0
    """When the next worker may move in."""

    def has_room(self) -> bool:
        return self.ready and len(self.items) < self.window

    def take_away(self) -> dict[int, Item]:
        """Empty the place; what the worker held is the caller's."""
        items, self.items = self.items, {}
        self.process, self.ready, self.window = None, False, 1
        return items


@dataclass(slots=True, eq=False)
class Ending:
    """A killed worker until it is reaped, and what it held."""

    process: WorkerProcess
    items: dict[int, Item]
    cause: str
    timed_out: int | None = None
    """Ticket of the item that ran too long; None where the worker died by itself."""
