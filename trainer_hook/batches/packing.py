"""Samples packed end to end, for variable-length attention kernels. Pure numpy; each array is built once.

In: samples of one micro-batch. Out: new arrays, which stay valid after the records are released.

Shapes: n samples, T tokens of all of them. Arrays over T describe the token at the same position: compare
`logprobs[t]` with the model's output at t - 1.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer_hook.batches.sample import Sample
from trainer_hook.record import UNKNOWN_VERSION


class PackedArrays:
    """The arrays of a micro-batch."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """[n] tokens of each sample"""
        return np.array([s.prompt_length + s.response_length for s in self._samples], np.int32)

    @cached_property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """[n + 1] start of each sample, then T"""
        return np.concatenate([[0], np.cumsum(self.lengths)], dtype=np.int32)

    @cached_property
    def tokens(self) -> npt.NDArray[np.int64]:
        """[T]"""
        return np.concatenate([sample.arrays.tokens for sample in self._samples], dtype=np.int64)

    @cached_property
    def padded_tokens(self) -> npt.NDArray[np.int64]:
        """[n, L] tokens of each sample, padded on the right with 0; L is the longest length"""
        out = np.zeros((len(self.lengths), self.lengths.max()), np.int64)
        out[self.sample_ids, self.position_ids] = self.tokens
        return out

    @cached_property
    def position_ids(self) -> npt.NDArray[np.int64]:
        """[T] position of each token in its sample"""
        starts = self.cu_seqlens[:-1].astype(np.int64)
        return np.arange(self.cu_seqlens[-1], dtype=np.int64) - np.repeat(starts, self.lengths)

    @cached_property
    def sample_ids(self) -> npt.NDArray[np.int64]:
        """[T] sample of each token; `values[sample_ids]` broadcasts per-sample values to tokens"""
        return np.repeat(np.arange(len(self._samples), dtype=np.int64), self.lengths)

    @cached_property
    def response_mask(self) -> npt.NDArray[np.bool_]:
        """[T] true for response tokens, trained or not"""
        starts = self.cu_seqlens[:-1] + np.array([sample.prompt_length for sample in self._samples], np.int64)
        return np.arange(self.cu_seqlens[-1]) >= np.repeat(starts, self.lengths)

    @cached_property
    def temperatures(self) -> npt.NDArray[np.float32]:
        """[T] divisor of the logits before comparing with `logprobs`; 1 for prompts"""
        spans = [
            [(s.settings.logprob_temperature, s.end) for s in sample.sampling_spans]
            for sample in self._samples
        ]
        return self._painted(np.ones(self.cu_seqlens[-1], np.float32), spans)

    @cached_property
    def versions(self) -> npt.NDArray[np.int64]:
        """[T] weight version that sampled the token; -1 for prompts and unknown versions"""
        spans = [[(span.version, span.end) for span in sample.version_spans] for sample in self._samples]
        return self._painted(np.full(self.cu_seqlens[-1], UNKNOWN_VERSION, np.int64), spans)

    @cached_property
    def loss_mask(self) -> npt.NDArray[np.float32]:
        """[T] 1 for trained tokens, 0 for prompts, fillers and masked tokens"""
        return self._at_responses([sample.arrays.loss_mask for sample in self._samples])

    @cached_property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """[T] log-probability under the policy that sampled the token, 0 for prompts"""
        return self._at_responses([sample.arrays.logprobs for sample in self._samples])

    def _painted(
        self, out: npt.NDArray[Any], spans: Sequence[Sequence[tuple[float, int]]]
    ) -> npt.NDArray[Any]:
        """`out` with each sample's response tokens set to the values of their spans, (value, end)."""
        for sample, end, values in zip(self._samples, self.cu_seqlens[1:].tolist(), spans, strict=True):
            first = start = end - sample.response_length
            for value, span_end in values:
                out[start : first + span_end] = value
                start = first + span_end
        return out

    def _at_responses(self, values: Sequence[npt.NDArray[np.generic]]) -> npt.NDArray[np.float32]:
        out = np.zeros(self.cu_seqlens[-1], np.float32)
        for end, response in zip(self.cu_seqlens[1:].tolist(), values, strict=True):
            out[end - len(response) : end] = response
        return out

    @cached_property
    def rewards(self) -> npt.NDArray[np.float32]:
        """[n] 0 for an excluded sample without a reward"""
        return np.array([sample.reward or 0.0 for sample in self._samples], np.float32)

    @cached_property
    def is_excluded(self) -> npt.NDArray[np.bool_]:
        """[n] samples that do not count in the group's mean and std"""
        return np.array([sample.is_excluded for sample in self._samples], np.bool_)

    @cached_property
    def group_reward_mean(self) -> npt.NDArray[np.float32]:
        """[n]"""
        return np.array([sample.group_reward_mean for sample in self._samples], np.float32)

    @cached_property
    def group_reward_std(self) -> npt.NDArray[np.float32]:
        """[n] ddof 1"""
        return np.array([sample.group_reward_std for sample in self._samples], np.float32)

    @cached_property
    def group_reward_count(self) -> npt.NDArray[np.int64]:
        """[n]"""
        return np.array([sample.group_reward_count for sample in self._samples], np.int64)

    def extra(self, name: str, rows: slice = slice(None)) -> npt.NDArray[Any]:
        """An extra column of all samples; `rows` selects rows, and only these are copied.

        [T, ...] for columns per token, 0 for tokens without a row (prompts, or a sample's last token);
        [n, ...] for columns per sample; [items, ...] for columns per item.

        Raises:
            ValueError: `rows` has a negative step.
        """
        parts = [sample.arrays.extras[name] for sample in self._samples]
        starts = self.cu_seqlens[:-1]
        match self._samples[0].extra_axis(name):
            case "N":
                return np.stack(parts)[rows]
            case "X":
                return np.concatenate(parts)[rows]
            case "R":
                starts = self.cu_seqlens[1:] - np.array([len(part) for part in parts], np.int32)
        return _strided(parts, starts.tolist(), range(int(self.cu_seqlens[-1]))[rows])

    @cached_property
    def num_loss_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


def _strided(parts: Sequence[npt.NDArray[Any]], starts: Sequence[int], rows: range) -> npt.NDArray[Any]:
    """Selected rows of an array with each part at its start and 0 elsewhere."""
    if rows.step < 1:
        raise ValueError(f"rows must have a step of 1 or more, found {rows.step}: reverse the result instead")
    out = np.zeros((len(rows), *parts[0].shape[1:]), parts[0].dtype)
    for start, part in zip(starts, parts, strict=True):
        first = max(0, -(-(start - rows.start) // rows.step))
        last = min(len(rows), -(-(start + len(part) - rows.start) // rows.step))
        if first < last:
            out[first:last] = part[rows[first] - start : rows[last - 1] - start + 1 : rows.step]
    return out
