"""Frozen snapshots of a hook's run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from trainer_hook.messages import Welcome


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """Settings of a run for the training loop."""

    run: str
    num_steps: int
    groups_per_step: int
    samples_per_group: int
    update_interval: int
    """Steps per published weight version."""

    @classmethod
    def of(cls, welcome: Welcome) -> Self:
        """From the hub's welcome."""
        return cls(
            run=welcome.run,
            num_steps=welcome.num_steps,
            groups_per_step=welcome.groups_per_step,
            samples_per_group=welcome.samples_per_group,
            update_interval=welcome.update_interval,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HookStatistics:
    """Time spent by this trainer process, and the hub's statistics of the whole run."""

    num_steps: int
    """Steps that this process has trained since it attached."""
    first_wait_s: float
    """Wait for the first batch: start-up and pipeline fill."""
    wait_s: float
    """All waits for a batch, including the first."""
    train_s: float
    """Time since the first request, without waits for a batch."""
    update_s: float
    """Time inside `update_weights`; included in `train_s`."""
    bubble_s: float
    """Time that engines were paused for weight updates."""
    num_held_records: int
    """Records that views of ended batches still hold in the ring."""
    hub: Mapping[str, Any]
    """The hub's statistics: groups by state, ring, engine throughput, what is waiting for what."""

    @property
    def trainer_idle(self) -> float:
        """Fraction of time since the first request spent waiting for data: wait / (wait + train)."""
        return self.wait_s / (self.wait_s + self.train_s) if self.wait_s else 0.0
