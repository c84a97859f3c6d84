"""Figures of steps and updates, and the trainer's time: measured once by the hub, for snapshot and events."""

# mypy: disable-error-code="misc"
# msgspec hands `frozen` and `kw_only` down to subclasses; the dataclass protocol that mypy knows does not.

import msgspec


class SnapshotPart(msgspec.Struct, frozen=True, kw_only=True):
    """Root of a snapshot's parts."""


class TimeSpent(SnapshotPart):
    """Seconds by what the trainer did, mean over its ranks; the present phase counts up to now."""

    waiting: float = 0.0
    """For data: no rank had any."""
    waiting_for_ranks: float = 0.0
    """For the slowest rank."""
    training: float = 0.0
    updating: float = 0.0
    outside: float = 0.0
    without_generator: float = 0.0
    """Part of `waiting`: no generator was running."""

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.waiting + self.waiting_for_ranks + self.training + self.updating + self.outside

    def plus(self, other: "TimeSpent") -> "TimeSpent":
        """Both together."""
        return TimeSpent(
            **{name: getattr(self, name) + getattr(other, name) for name in TimeSpent.__struct_fields__}
        )

    def minus(self, other: "TimeSpent") -> "TimeSpent":
        """What is more here."""
        return TimeSpent(
            **{name: getattr(self, name) - getattr(other, name) for name in TimeSpent.__struct_fields__}
        )

    @property
    def idle(self) -> float | None:
        """Share spent waiting for data; None if no time was spent."""
        return self.waiting / self.total_s if self.total_s > 0 else None

    @property
    def away(self) -> float:
        """Share of the waits for data in which no generator was running."""
        return self.without_generator / self.waiting if self.waiting > 0 else 0.0


class StepFigures(SnapshotPart):
    """One trained step."""

    step: int
    version: int
    """The weight version that trained it."""
    time_s: float
    """When its last rank finished; unix time."""
    num_groups: int
    num_samples: int
    num_tokens: int
    """In the loss."""
    response_tokens: int
    reward_mean: float
    staleness_max: int | None
    """None if an engine reported no version."""
    staleness_mean: float | None
    """Over groups, each by its oldest token."""
    spent: TimeSpent
    """Since the end of the previous step."""
    is_first: bool = False
    """Of a trainer's life: its wait is start-up."""
    busy: float | None = None
    """Engine load when it ended, as a share of capacity; None: unknown."""


class UpdateFigures(SnapshotPart):
    """One published weight version."""

    version: int
    time_s: float
    write_s: float
    """From the last rank's entry to the last one's exit: the trainer gathers and writes."""
    load_s: float
    """Until every engine had confirmed."""
    bubble_s: float
    """Engines were paused."""
