"""Which weight version slime's engines hold, by slime's own order of calls. Pure.

slime does not report updates to the rollout function, but its train loops fix their order: version 1 is
pushed before the first rollout, version v + 1 after each `interval` steps, and `train_async` calls for
rollout k + 1 before it trains k. Versions count from 1 again when a training resumes.
"""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class VersionClock:
    """The versions since the trainer's start."""

    first_step: int
    """Rollout id of the first call."""
    interval: int
    """Steps per version."""
    ahead: int = 0
    """How many versions engines were ahead of the order of calls."""

    def trained_by(self, step: int) -> int:
        """The version that trains the batch of a rollout id."""
        return 1 + step // self.interval - self.first_step // self.interval + self.ahead

    def held_at(self, step: int) -> int:
        """The version that engines hold when the rollout function is called for a rollout id."""
        return self.trained_by(max(step - 1, self.first_step))

    def saw(self, newest: int, step: int) -> bool:
        """Record the newest version of a batch's tokens; True if the clock was behind and is corrected."""
        excess = newest - self.trained_by(step)
        if excess <= 0:
            return False
        self.ahead += excess
        return True
