"""The answer to one prompt, collected over all its requests. Pure.

P: prompt tokens, R: output tokens.

Invariant: ids, log-probabilities and version spans grow together, by whole completions only; a restart begins
with empty fields.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fa_rollout.client.wire.completion import Completion
from fa_rollout.generator.turns.extras import Arrays, extended
from fa_rollout.generator.turns.versions import merge_spans
from fa_rollout.sample import FinishReason, FloatArray, IntArray
from trainer_hook.record import TokenSampling, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A finished answer to one prompt."""

    input_ids: IntArray
    """[P]"""
    output_ids: IntArray
    """[R] Token ids as the engine returned them, including the stop token."""
    logprobs: FloatArray
    """[R]"""
    version_spans: tuple[VersionSpan, ...]
    """Ends are counted in output tokens of this turn."""
    finish_reason: FinishReason
    sampling: TokenSampling | None = None
    """Its sampling settings; None means the run's `[sampling]`."""
    completions: tuple[Completion, ...] = ()
    """Its completions, in order, without those restored from a checkpoint. The last may have tokens beyond
    the end of the turn."""
    kept_extras: Arrays = field(default_factory=dict)
    """Extra arrays of tokens restored from a checkpoint."""

    @property
    def extras(self) -> Arrays:
        """Extra arrays that engines returned, such as `routed_experts` [P + R - 1, ...]."""
        rows = len(self.input_ids) + len(self.output_ids) - 1
        return {name: array[:rows] for name, array in _extras(self.kept_extras, self.completions).items()}


@dataclass(slots=True)
class Draft:
    """An unfinished turn."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """More keys for each of its requests."""
    ids: list[IntArray] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    logprobs: list[FloatArray] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    num_tokens: int = 0
    kept_extras: Arrays = field(default_factory=dict)
    """As in `Turn`."""
    reason: FinishReason | None = None
    """Why it ended; None while unfinished."""

    @property
    def extras(self) -> Arrays:
        """Extra arrays that engines returned so far."""
        return _extras(self.kept_extras, self.completions)

    def add(self, completion: Completion, spans: Sequence[VersionSpan]) -> None:
        """Append one completion; its spans cover its tokens."""
        self.completions.append(completion)
        self.ids.append(completion.output_ids)
        self.logprobs.append(completion.logprobs)
        self.spans.extend(VersionSpan(span.version, self.num_tokens + span.end) for span in spans)
        self.num_tokens += len(completion.output_ids)

    def clear(self) -> None:
        """Discard everything, for a restart."""
        self.completions, self.ids, self.logprobs, self.spans, self.num_tokens = [], [], [], [], 0
        self.kept_extras = {}

    def cut(self, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens."""
        self.ids = [np.concatenate(self.ids)[:num_tokens]]
        self.logprobs = [np.concatenate(self.logprobs)[:num_tokens]]
        spans = merge_spans((span.version, span.end) for span in self.spans)
        starts = [0, *(span.end for span in spans)]
        self.spans = [
            VersionSpan(span.version, min(span.end, num_tokens))
            for span, start in zip(spans, starts, strict=False)
            if start < num_tokens
        ]
        self.num_tokens = num_tokens

    @property
    def output_ids(self) -> IntArray:
        """All tokens so far."""
        return np.concatenate(self.ids) if self.ids else np.empty(0, np.int32)

    def prompt(self, input_ids: IntArray) -> IntArray:
        """The prompt for the next request: input ids and all tokens so far."""
        return np.concatenate([input_ids, *self.ids]) if self.ids else input_ids

    def finish(self, input_ids: IntArray, reason: FinishReason) -> Turn:
        """The finished turn."""
        self.reason = reason
        return Turn(
            input_ids=input_ids,
            output_ids=self.output_ids,
            logprobs=np.concatenate(self.logprobs) if self.logprobs else np.empty(0, np.float32),
            version_spans=merge_spans((span.version, span.end) for span in self.spans),
            finish_reason=reason,
            completions=tuple(self.completions),
            kept_extras=self.kept_extras,
        )


def _extras(kept: Arrays, completions: Sequence[Completion]) -> Arrays:
    arrays = dict(kept)
    for completion in completions:
        arrays |= extended(arrays, completion.extra)
    return arrays
