"""SGLang's `sampling_params`: names, defaults and limits of one request.

Decoding refuses unknown names and wrong types; `verify` refuses values out of range, in SGLang's words.
"""

import math
from typing import Any

import msgspec

from fa_rollout.engines.embedded.errors import RefusedRequest

GREEDY_BELOW = 1e-6


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one completion is sampled."""

    max_new_tokens: int | None = 128
    """None: to the end of the context; 0: score the prompt only."""
    min_new_tokens: int = 0
    temperature: float = 1.0
    """Below 1e-6: greedy, with log-probs at temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Penalties look at output tokens only, as SGLang's do."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    """Also ignores `stop_token_ids`, as SGLang does."""
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    n: int = 1
    sampling_seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stream_interval: int | None = None
    stop_regex: str | list[str] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    custom_params: dict[str, Any] | None = None
    beam_width: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def logprob_temperature(self) -> float:
        """What logits are divided by before the log-softmax."""
        return 1.0 if self.temperature < GREEDY_BELOW else self.temperature

    @property
    def is_truncated(self) -> bool:
        """Whether the distribution is cut before the draw."""
        return self.top_p < 1.0 or self.top_k > 1 or self.min_p > 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in stop if text)

    def verify(self, *, vocab_size: int) -> None:
        """Raise RequestRefused unless every value is in its range and supported."""
        for name, holds, rule in self._rules():
            if not holds:
                raise RefusedRequest(f"{name} must be {rule}, got {getattr(self, name):g}.")
        self._verify_logit_bias(vocab_size)
        for name in ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "beam_width"):
            if getattr(self, name) is not None:
                raise RefusedRequest(f"{name} is not supported by the embedded engine; leave it out.")

    def _rules(self) -> list[tuple[str, bool, str]]:
        longest = math.inf if self.max_new_tokens is None else self.max_new_tokens
        return [
            ("temperature", 0.0 <= self.temperature < math.inf, "a non-negative finite number"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (disable) or at least 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "in [-2, 2]"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "in [-2, 2]"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 2.0, "in (0, 2]"),
            ("max_new_tokens", longest >= 0, "at least 0"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= longest, "in [0, max_new_tokens]"),
            ("n", self.n >= 1, "at least 1"),
        ]

    def _verify_logit_bias(self, vocab_size: int) -> None:
        for key, bias in (self.logit_bias or {}).items():
            if not key.isdecimal() or int(key) >= vocab_size or not math.isfinite(bias):
                raise RefusedRequest(
                    f"logit_bias must map token ids in [0, {vocab_size - 1}] to finite numbers, "
                    f"got {key}: {bias}."
                )
