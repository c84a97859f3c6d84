"""Everything that a simulated run depends on: the knobs of a run, its engines, its trainer, its answers."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np

from fa_rollout.config import Config, ConfigError, from_dict

Lengths = Callable[[random.Random, int, int], list[int]]
"""(random numbers, group, samples) -> the response lengths of that group's samples, in tokens."""
VAST_RING_BYTES = 1 << 40


def lognormal_lengths(median: float, sigma: float, low: int, high: int) -> Lengths:
    """Each sample's by itself: lognormal, clipped to [low, high]."""
    mean = float(np.log(median))

    def draw(rng: random.Random, group: int, num_samples: int) -> list[int]:
        return [int(min(high, max(low, rng.lognormvariate(mean, sigma)))) for _ in range(num_samples)]

    return draw


def recorded_lengths(groups: Sequence[Sequence[int]]) -> Lengths:
    """Group k has the lengths of recorded group k, from the start again at the end.

    A group that was recorded with another number of samples is drawn from, so that what is alike about the
    answers to one prompt stays so.
    """

    def draw(rng: random.Random, group: int, num_samples: int) -> list[int]:
        known = groups[group % len(groups)]
        return list(known) if len(known) == num_samples else rng.choices(known, k=num_samples)

    return draw


def lengths_of_file(path: Path, high: int) -> Lengths:
    """Each sample's by itself, drawn from a file of whole numbers, one a line; cut at `high`.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        numbers = [int(line) for line in path.read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or error
        raise ConfigError(f"lengths must be whole numbers, one a line, found {path}: {found}") from None
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"lengths must be 1 or more, found {min(numbers, default='none')} in {path}")
    return lambda rng, group, num_samples: [min(high, n) for n in rng.choices(numbers, k=num_samples)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The assumptions of a simulated run."""

    num_steps: int = 60
    groups_per_step: int = 8
    samples_per_group: int = 4
    update_interval: int = 1
    staleness: int = 4
    staleness_policy: str = "wait"
    surplus_groups: int = 0
    partial: str = "resume"
    """`restart`: what an update meets half-made is aborted, and begins anew."""
    rejection: float = 0.0
    """Share of finished groups that a filter rejects."""
    lengths: Lengths = field(default_factory=lambda: lognormal_lengths(1500, 0.8, 64, 8192))
    prompt_tokens: int = 256
    """Only their bytes in the ring count."""
    num_engines: int = 1
    num_slots: int = 32
    """Requests that one engine runs at once."""
    tokens_per_s: float = 1500.0
    """Decode rate of one request, alone."""
    total_tokens_per_s: float = 0.0
    """Most that one engine decodes for all its requests together; 0: no limit."""
    prefill_s: float = 0.0
    """From a request's start to its first token."""
    reward_s: float = 0.0
    """From a group's last token to its record; it holds no slot."""
    train_s: float = 1.0
    write_s: float = 0.0
    """Time that the trainer writes weights while engines continue."""
    update_s: float = 0.05
    """Time that engines are paused for an update."""
    ring_bytes: int = VAST_RING_BYTES
    """Admission plans with it; a record that must wait for room is not modelled."""
    seed: int = 0

    def like(self, config: Config) -> Self:
        """The same engines, trainer and answers under a configuration's knobs."""
        rollout = config.rollout
        return replace(
            self,
            num_steps=rollout.num_steps,
            groups_per_step=rollout.groups_per_step,
            samples_per_group=rollout.samples_per_group,
            update_interval=rollout.update_interval,
            staleness=rollout.staleness,
            staleness_policy=rollout.staleness_policy,
            surplus_groups=rollout.surplus_groups,
            # Engines that hold answers in an update abort nothing; under "auto" newer ones do so.
            partial=rollout.partial if config.engine.pause_mode in ("auto", "abort") else "resume",
            num_engines=len(config.engine.urls) or config.launch.number,
            num_slots=config.engine.max_concurrent_samples,
            ring_bytes=config.ring.bytes,
        )

    def config(self) -> Config:
        """The configuration of such a run."""
        return from_dict(
            {
                "data": {"path": "simulated"},
                "reward": {"function": "simulated:reward"},
                "engine": {
                    "urls": [f"http://simulated:{place + 1}" for place in range(self.num_engines)],
                    "max_concurrent_samples": self.num_slots,
                },
                "ring": {"bytes": self.ring_bytes},
                "rollout": {
                    "num_steps": self.num_steps,
                    "groups_per_step": self.groups_per_step,
                    "samples_per_group": self.samples_per_group,
                    "update_interval": self.update_interval,
                    "staleness": self.staleness,
                    "staleness_policy": self.staleness_policy,
                    "partial": self.partial,
                    "surplus_groups": self.surplus_groups,
                },
            }
        )
