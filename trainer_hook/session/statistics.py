"""What a hook knows of its run: frozen snapshots."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from trainer_hook.messages import Welcome


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """The settings of a run that a training loop may need."""

    run: str
    num_steps: int
    groups_per_step: int
    samples_per_group: int
    update_interval: int
    """Steps trained per published weight version."""

    @classmethod
    def of(cls, welcome: Welcome) -> Self:
        """As the hub told it."""
        return cls(
            run=welcome.run,
            num_steps=welcome.num_steps,
            groups_per_step=welcome.groups_per_step,
            samples_per_group=welcome.samples_per_group,
            update_interval=welcome.update_interval,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HookStatistics:
    """Where this trainer process spent its time, and what the hub counts for the whole run."""

    num_steps: int
    """Steps that this process has trained since it attached."""
    first_wait_s: float
    """Wait for the first batch: start-up and filling the pipeline."""
    wait_s: float
    """All waits for a batch, the first included."""
    train_s: float
    """All time since the first request that was no wait for a batch."""
    update_s: float
    """Time inside `update_weights`; a part of `train_s`."""
    bubble_s: float
    """Time that engines stood still for weight updates."""
    num_held_records: int
    """Records that views of ended batches still hold in the ring."""
    hub: Mapping[str, Any]
    """The hub's figures: counts of groups by state, ring, engines' throughput, who waits for whom."""

    @property
    def trainer_idle(self) -> float:
        """Share of time since the first request that the trainer waited for data: wait / (wait + train)."""
        return self.wait_s / (self.wait_s + self.train_s) if self.wait_s else 0.0
