"""Changes of one request's logits before the softmax: penalties, bias, minimum length.

RL rarely uses them, so they are kept per request and applied row by row; log-probs are of the changed
logits, as in SGLang.
"""

import torch

from fa_rollout.engines.embedded.model.sampling_params import SamplingParams


class LogitAdjuster:
    """What one request's logits get; None of `create` when they stay as they are."""

    __slots__ = ("_bias_V", "_counts_V", "_forbidden", "_num_forbidden_steps", "_params")

    def __init__(self, params: SamplingParams, stop_ids: frozenset[int], vocab_size: int) -> None:
        self._params = params
        self._forbidden = [token_id for token_id in sorted(stop_ids) if 0 <= token_id < vocab_size]
        self._num_forbidden_steps = params.min_new_tokens
        self._counts_V = torch.zeros(vocab_size)
        self._bias_V = torch.zeros(vocab_size)
        for key, bias in (params.logit_bias or {}).items():
            self._bias_V[int(key)] = bias

    @classmethod
    def create(
        cls, params: SamplingParams, stop_ids: frozenset[int], vocab_size: int
    ) -> "LogitAdjuster | None":
        is_needed = (
            params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
            or params.repetition_penalty != 1.0
            or params.logit_bias
            or params.min_new_tokens > 0
        )
        return cls(params, stop_ids, vocab_size) if is_needed else None

    def observe(self, token_id: int) -> None:
        """Count a sampled token."""
        self._counts_V[token_id] += 1
        self._num_forbidden_steps -= 1

    def apply(self, logits_V: torch.Tensor) -> None:
        """Change one row of logits in place."""
        params = self._params
        seen_V = self._counts_V > 0
        if params.repetition_penalty != 1.0:
            scale = params.repetition_penalty
            scaled_V = torch.where(logits_V > 0, logits_V / scale, logits_V * scale)
            logits_V.copy_(torch.where(seen_V, scaled_V, logits_V))
        logits_V -= params.frequency_penalty * self._counts_V + params.presence_penalty * seen_V
        logits_V += self._bias_V
        if self._num_forbidden_steps > 0:
            logits_V[self._forbidden] = -torch.inf
