"""The result of a simulated run.

Shares and means leave out the first tenth of the steps, in which the pipeline fills.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(slots=True)
class SimulationOutcome:
    """A simulated run, step by step."""

    step_s: list[float] = field(default_factory=list)
    """Time from one step's end to the next."""
    wait_s: list[float] = field(default_factory=list)
    """Time that the trainer waited for each step's batch."""
    step_tokens: list[int] = field(default_factory=list)
    """Response tokens that each step trained."""
    staleness: list[int] = field(default_factory=list)
    """Of each trained group."""
    trained_lengths: list[int] = field(default_factory=list)
    """Response tokens of each trained group."""
    drawn_lengths: list[int] = field(default_factory=list)
    """Of each group when it was first started; unbiased training has the same mean."""
    dropped_lengths: list[int] = field(default_factory=list)
    num_restarts: int = 0
    duration_s: float = 0.0
    utilisation: float = 0.0
    """Share of the engines' slots that were busy."""
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def trainer_idle(self) -> float:
        """Share of time that the trainer waits for data."""
        return sum(_steady(self.wait_s)) / sum(_steady(self.step_s))

    @property
    def mean_step_s(self) -> float:
        """Mean time of a step."""
        steady = _steady(self.step_s)
        return sum(steady) / len(steady)

    @property
    def tokens_per_s(self) -> float:
        """Response tokens trained a second."""
        return sum(_steady(self.step_tokens)) / sum(_steady(self.step_s))

    @property
    def length_bias(self) -> float:
        """Mean trained length over mean drawn length, minus 1."""
        return float(np.mean(self.trained_lengths) / np.mean(self.drawn_lengths)) - 1.0

    def staleness_at(self, share: float) -> int:
        """Quantile of the trained groups' staleness, that of the pipeline's filling included."""
        return quantile(self.staleness, share)

    def figures(self) -> dict[str, float]:
        """The figures that settings are compared by."""
        return {
            "step_s": self.mean_step_s,
            "trainer_idle": self.trainer_idle,
            "tokens_per_s": self.tokens_per_s,
            "utilisation": self.utilisation,
            "staleness_mean": float(np.mean(self.staleness)),
            "staleness_p50": self.staleness_at(0.5),
            "staleness_p99": self.staleness_at(0.99),
            "dropped": len(self.dropped_lengths) / (len(self.dropped_lengths) + len(self.trained_lengths)),
            "length_bias": self.length_bias,
        }


def quantile(values: Sequence[int], share: float) -> int:
    """The smallest value that `share` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]


def _steady(values: list[T]) -> list[T]:
    return values[len(values) // 10 :]
