"""Policy-gradient losses, one value for each token: multiply by the loss mask, sum, and scale.

In: log-probabilities of the model that trains, with a gradient; those of the policy that sampled; advantages.
Out: [T]. Values of tokens outside of the loss mask have no meaning (`policy_loss` sets them to 0).

Shapes: T tokens of a micro-batch, packed.
"""

from typing import TYPE_CHECKING

import torch

from trainer_hook.losses.corrections import sequence_log_ratios, truncated_weights

if TYPE_CHECKING:
    from trainer_hook.batches.batch import MicroBatch


def policy_loss(
    logprobs_T: torch.Tensor, micro_batch: "MicroBatch", *, low: float = 0.2, high: float = 0.28
) -> torch.Tensor:
    """[T]: `ppo_clip` with GRPO advantages against the policy that sampled; 0 outside of the loss mask.

    `low` and `high` as in DAPO, arXiv 2503.14476.
    """
    advantages_T = micro_batch.advantages()[micro_batch.sample_ids]
    tensors = (micro_batch.logprobs, advantages_T, micro_batch.loss_mask)
    sampled_T, advantages_T, mask_T = (tensor.to(logprobs_T.device) for tensor in tensors)
    loss_T = ppo_clip(logprobs_T, sampled_T, advantages_T, low=low, high=high, dual=3.0)
    return torch.where(mask_T > 0, loss_T, 0.0)


def ppo_clip(
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
) -> torch.Tensor:
    """[T]: -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprobs - old_logprobs).

    PPO, arXiv 1707.06347; `high` above `low` is DAPO's clip-higher. `dual` bounds the loss of tokens with a
    negative advantage, which the clip leaves unbounded, by dual |A| (dual-clip PPO, arXiv 1912.09729).
    """
    ratios_T = (logprobs_T - old_logprobs_T).exp()
    clipped_T = ratios_T.clamp(1 - low, 1 + high)
    loss_T = -torch.minimum(ratios_T * advantages_T, clipped_T * advantages_T)
    if dual is None:
        return loss_T
    return torch.where(advantages_T < 0, torch.minimum(loss_T, -dual * advantages_T), loss_T)


def decoupled_ppo(
    logprobs_T: torch.Tensor,
    proximal_logprobs_T: torch.Tensor,
    sampled_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    mask_T: torch.Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    cap: float = float("inf"),
) -> torch.Tensor:
    """[T]: w ppo_clip(logprobs, proximal), w = min(exp(proximal - sampled), cap).

    The proximal policy is the model before this step's first optimizer step: recompute its log-probabilities
    with `token_logprobs` under `torch.no_grad()`. arXiv 2110.00641; AReaL, arXiv 2505.24298.
    """
    weights_T = truncated_weights(proximal_logprobs_T - sampled_logprobs_T, mask_T, cap=cap)
    return weights_T * ppo_clip(logprobs_T, proximal_logprobs_T, advantages_T, low=low, high=high)


def gspo(
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    mask_T: torch.Tensor,
    sample_ids_T: torch.Tensor,
    *,
    low: float = 3e-4,
    high: float = 4e-4,
) -> torch.Tensor:
    """[T]: `ppo_clip` with the geometric mean ratio of each token's sample in place of its own ratio.

    GSPO, arXiv 2507.18071, in its token form (eq. 13): the sample's ratio as a number, times the token's
    ratio to itself, so that advantages may differ between tokens. The paper divides the sum of each sample
    by its length; so must a caller who wants its weighting.
    """
    log_ratios_T = logprobs_T - old_logprobs_T
    sequence_T = sequence_log_ratios(log_ratios_T.detach(), mask_T, sample_ids_T, mean=True)
    return ppo_clip(
        logprobs_T - logprobs_T.detach() + sequence_T,
        torch.zeros_like(old_logprobs_T),
        advantages_T,
        low=low,
        high=high,
    )


def cispo(
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    *,
    low: float = 1.0,
    high: float = 0.28,
) -> torch.Tensor:
    """[T]: -sg(clip(r, 1 - low, 1 + high)) A logprobs: every token keeps a gradient, its weight is clipped.

    CISPO, MiniMax-M1, arXiv 2506.13585 (no lower bound there: low = 1).
    """
    weights_T = (logprobs_T - old_logprobs_T).detach().exp().clamp(1 - low, 1 + high)
    return -weights_T * advantages_T * logprobs_T
