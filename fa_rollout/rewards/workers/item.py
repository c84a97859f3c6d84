"""The books of a pool: what a score waits for, and the calls that it is made of."""

import asyncio
from dataclasses import dataclass

from fa_rollout.rewards.outcomes import Outcomes, RewardFailed, RewardOutcome
from fa_rollout.sample import Sample


@dataclass(slots=True, eq=False)
class ScoringJob:
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
    job: ScoringJob
    first: int
    """Index in the job of the first of its samples."""
    samples: list[Sample]
    payload: bytes = b""
    """The samples pickled, only from shortly before they are sent until they are."""
    num_deaths: int = 0
    """Workers that died on it."""

    def finish(self, outcomes: Outcomes) -> None:
        if isinstance(outcomes, RewardFailed):
            outcomes = [outcomes] * len(self.samples)
        self.job.deliver(self.first, outcomes)
