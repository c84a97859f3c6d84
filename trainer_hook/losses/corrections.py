"""Corrections for tokens that another policy sampled: weights and masks for a token-level loss.

In: log-ratios, the trainer's log-probability minus the engine's. Out: factors without a gradient, to multiply
the loss by. What separates the two policies is staleness (older weights) and mismatch (another kernel or
dtype); a correction treats both alike.

Shapes: T tokens of a micro-batch, packed; n samples. `sample_ids_T` is `micro_batch.sample_ids`, `mask_T` is
`micro_batch.loss_mask`: tokens outside of it count nowhere and get 0.
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trainer_hook.batches.batch import MicroBatch


def truncated_weights(log_ratios_T: torch.Tensor, mask_T: torch.Tensor, *, cap: float = 2.0) -> torch.Tensor:
    """[T]: min(ratio, cap), truncated importance sampling.

    At token level this is TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training"); on `sequence_log_ratios` it is the sequence-level form. Truncation: Ionides 2008.
    """
    return _ratios(log_ratios_T).clamp(max=cap) * mask_T


def masked_weights(
    log_ratios_T: torch.Tensor, mask_T: torch.Tensor, *, low: float = 0.5, high: float = 2.0
) -> torch.Tensor:
    """[T]: ratio where low <= ratio <= high, 0 elsewhere: masked importance sampling.

    Two-sided at token level this is IcePop (Ring-1T, arXiv 2510.18855); on `sequence_log_ratios` with low=0
    it is MIS, which leaves whole samples out (Liu et al. 2025, "When speed kills stability").
    """
    ratios_T = _ratios(log_ratios_T)
    return ratios_T * ((ratios_T >= low) & (ratios_T <= high)) * mask_T


def sequence_log_ratios(
    log_ratios_T: torch.Tensor, mask_T: torch.Tensor, sample_ids_T: torch.Tensor, *, mean: bool = False
) -> torch.Tensor:
    """[T]: each token has the sum of its sample's log-ratios; with `mean`, their mean, the log of the
    geometric mean of the ratios. Differentiable."""
    num_samples = int(sample_ids_T[-1]) + 1 if len(sample_ids_T) else 0
    # where, not a product: outside of the mask anything may stand, an infinity included.
    counted_T = torch.where(mask_T > 0, log_ratios_T, torch.zeros_like(log_ratios_T))
    sums_n = counted_T.new_zeros(num_samples).index_add(0, sample_ids_T, counted_T)
    if mean:
        counts_n = mask_T.new_zeros(num_samples).index_add(0, sample_ids_T, mask_T)
        sums_n = sums_n / counts_n.clamp(min=1)
    return sums_n[sample_ids_T]


def geometric_sequence_mask(
    log_ratios_T: torch.Tensor,
    mask_T: torch.Tensor,
    sample_ids_T: torch.Tensor,
    *,
    low: float = 0.99,
    high: float = 1.001,
) -> torch.Tensor:
    """[T] of 0 and 1: samples whose geometric mean ratio lies in [low, high] stay, whole.

    Independent of length, unlike a bound on the product (Liu et al. 2025, "When speed kills stability"; the
    bounds are for a mismatch of kernels, so widen them for stale samples).
    """
    ratios_T = _ratios(sequence_log_ratios(log_ratios_T, mask_T, sample_ids_T, mean=True))
    return ((ratios_T >= low) & (ratios_T <= high)) * mask_T


def version_mask(micro_batch: "MicroBatch", *, oldest: int) -> torch.Tensor:
    """[T] of 0 and 1: trained tokens that weights of version `oldest` or newer sampled.

    Tokens of an unknown version (-1) are left out.
    """
    return (micro_batch.versions >= max(0, oldest)) * micro_batch.loss_mask


def _ratios(log_ratios_T: torch.Tensor) -> torch.Tensor:
    return log_ratios_T.detach().exp()
