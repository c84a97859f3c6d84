"""How far the policy that trains is from the one that sampled, in sums that add up over micro-batches.

In: log-probabilities of both, the loss mask, staleness of tokens. Out: `Diagnostics`, whole and by staleness.

Shapes: T tokens of a micro-batch, packed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trainer_hook.batches.batch import MicroBatch


@dataclass(slots=True, kw_only=True)
class Gap:
    """Sums over tokens; r = exp(trainer's - engine's log-probability), both at the sampling temperature."""

    num_tokens: int = 0
    sum_ratio: float = 0.0
    sum_square_ratio: float = 0.0
    sum_k1: float = 0.0
    """-log r"""
    sum_k3: float = 0.0
    """r - 1 - log r"""
    sum_abs: float = 0.0
    """|log r|"""
    max_abs: float = 0.0
    num_clipped: int = 0
    """Tokens with r outside of [1 - low, 1 + high]."""

    @property
    def effective_sample_share(self) -> float:
        """(sum r)^2 / (T sum r^2), from 1/T to 1: Kish 1965."""
        return self.sum_ratio**2 / (self.num_tokens * self.sum_square_ratio) if self.num_tokens else 1.0

    @property
    def kl_k1(self) -> float:
        """Mean of -log r: unbiased for KL(engine || trainer), high variance. Schulman 2020, "Approximating
        KL divergence"."""
        return self._mean(self.sum_k1)

    @property
    def kl_k3(self) -> float:
        """Mean of r - 1 - log r: unbiased too, never negative, of low variance."""
        return self._mean(self.sum_k3)

    @property
    def mean_abs(self) -> float:
        """Mean |log r|."""
        return self._mean(self.sum_abs)

    @property
    def clipped_share(self) -> float:
        return self._mean(self.num_clipped)

    def _mean(self, total: float) -> float:
        return total / self.num_tokens if self.num_tokens else 0.0

    def add(self, other: "Gap") -> None:
        """Count further tokens."""
        largest = max(self.max_abs, other.max_abs)
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))
        self.max_abs = largest


@dataclass(slots=True, kw_only=True)
class Diagnostics:
    """Gaps between trainer and engine over the tokens in the loss."""

    total: Gap = field(default_factory=Gap)
    by_staleness: dict[int, Gap] = field(default_factory=dict)
    """By trained version minus the token's version; -1 where the engine did not report one."""

    def add(self, other: "Diagnostics") -> None:
        """Count further tokens, such as the next micro-batch's."""
        self.total.add(other.total)
        for staleness, gap in other.by_staleness.items():
            self.by_staleness.setdefault(staleness, Gap()).add(gap)


def diagnose(
    logprobs_T: torch.Tensor,
    micro_batch: "MicroBatch",
    *,
    low: float = 0.2,
    high: float = 0.28,
) -> Diagnostics:
    """Gaps of one micro-batch; add those of a step together, and report them with `hook.report`.

    Args:
        logprobs_T: [T] as `token_logprobs` returns them, before the step's first optimizer step.
        low: lower clip of the loss.
        high: upper clip of the loss.
    """
    is_trained_T = micro_batch.loss_mask > 0
    log_ratios_R = (logprobs_T.detach().cpu() - micro_batch.logprobs)[is_trained_T].double()
    staleness_R = micro_batch.staleness[is_trained_T]
    by_staleness: Mapping[int, Gap] = {
        int(value): _gap(log_ratios_R[staleness_R == value], low=low, high=high)
        for value in staleness_R.unique().tolist()
    }
    diagnostics = Diagnostics()
    for value, gap in by_staleness.items():
        diagnostics.add(Diagnostics(total=gap, by_staleness={value: gap}))
    return diagnostics


def _gap(log_ratios: torch.Tensor, *, low: float, high: float) -> Gap:
    ratios, sizes = log_ratios.exp(), log_ratios.abs()
    return Gap(
        num_tokens=len(log_ratios),
        sum_ratio=float(ratios.sum()),
        sum_square_ratio=float((ratios**2).sum()),
        sum_k1=float(-log_ratios.sum()),
        sum_k3=float((ratios - 1 - log_ratios).sum()),
        sum_abs=float(sizes.sum()),
        max_abs=float(sizes.max()),
        num_clipped=int(((ratios < 1 - low) | (ratios > 1 + high)).sum()),
    )
