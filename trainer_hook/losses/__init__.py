"""Losses for off-policy data: log-probabilities as the engine means them, corrections, diagnostics.

Pure functions of tensors; torch and nothing else. The usual loop:

    from trainer_hook.losses import policy_loss, token_logprobs

    for micro_batch in batch.micro_batches():
        logprobs = token_logprobs(model(micro_batch.padded_tokens).logits, micro_batch)
        (policy_loss(logprobs, micro_batch).sum() * batch.loss_scale).backward()

Shapes, in every module: T tokens of a micro-batch, packed end to end; n samples; V vocabulary.
"""

from trainer_hook.losses.corrections import (
    geometric_sequence_mask,
    masked_weights,
    sequence_log_ratios,
    truncated_weights,
    version_mask,
)
from trainer_hook.losses.diagnostics import Diagnostics, diagnose
from trainer_hook.losses.logprobs import selected_logprobs, token_logprobs
from trainer_hook.losses.policy import cispo, decoupled_ppo, gspo, policy_loss, ppo_clip

__all__ = [
    "Diagnostics",
    "cispo",
    "decoupled_ppo",
    "diagnose",
    "geometric_sequence_mask",
    "gspo",
    "masked_weights",
    "policy_loss",
    "ppo_clip",
    "selected_logprobs",
    "sequence_log_ratios",
    "token_logprobs",
    "truncated_weights",
    "version_mask",
]
