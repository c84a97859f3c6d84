"""One completion: numbers, text, and views of its tokens in the ring.

Shapes: L tokens of prompt and response, r response tokens.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainer_hook.batches.group import Group
from trainer_hook.batches.views import as_tensor
from trainer_hook.messages import Part
from trainer_hook.record import UNKNOWN_VERSION, SamplingSpan, VersionSpan

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SampleArrays:
    """A sample in numpy: read-only views of the ring, except a loss mask that the batch changed."""

    tokens: npt.NDArray[np.int32]
    """[L]"""
    logprobs: npt.NDArray[np.float32]
    """[r]"""
    loss_mask: npt.NDArray[np.uint8]
    """[r]"""
    extras: dict[str, npt.NDArray[Any]]
    """Extra columns by name; see `Sample.extras`."""


class Sample:
    """One completion of one prompt.

    Tensors are zero-copy and read-only: an in-place write causes a segmentation fault, so `clone()` first.
    A tensor stays valid while it is referenced, also after the `with` block of its batch, and holds its
    record in the ring for that time. After the block, attributes that create tensors raise `StaleView`;
    numbers and text remain readable.
    """

    __slots__ = ("_group", "_index", "_part", "_prompt_length", "_response_length", "_version")

    def __init__(self, group: Group, part: Part, version: int) -> None:
        index = part.member
        self._group = group
        self._part = part
        self._index = index
        self._version = version
        self._response_length = group.response_ends[index + 1] - group.response_ends[index]
        self._prompt_length = group.ends[index + 1] - group.ends[index] - self._response_length

    # --- tensors ----------------------------------------------------------------------------------

    @property
    def arrays(self) -> SampleArrays:
        """The sample in numpy. Raises StaleView after the batch has ended."""
        columns = self._group.columns
        start, end = self._group.ends[self._index], self._group.ends[self._index + 1]
        first, last = self._group.response_ends[self._index], self._group.response_ends[self._index + 1]
        return SampleArrays(
            columns["tokens"][start:end],
            columns["logprobs"][first:last],
            self._masked(columns["loss_mask"][first:last]),
            {name: self._group.extra_of(name, self._index) for name in self._group.extra},
        )

    def _masked(self, loss_mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """The record's loss mask with the batch's changes; the record itself is never modified."""
        if self._part.filler:
            return np.zeros_like(loss_mask)
        if self._part.mask_before:
            loss_mask = loss_mask.copy()
            loss_mask[: self._part.mask_before] = 0
        return loss_mask

    @property
    def tokens(self) -> "torch.Tensor":
        """[L] int32: prompt and response, the engine's own ids."""
        return as_tensor(self.arrays.tokens)

    @property
    def response_tokens(self) -> "torch.Tensor":
        """[r] int32"""
        return as_tensor(self.arrays.tokens[self._prompt_length :])

    @property
    def logprobs(self) -> "torch.Tensor":
        """[r] float32: log-probability of each response token, of softmax(logits / temperature) under the
        policy that sampled it; see `sampling_spans`."""
        return as_tensor(self.arrays.logprobs)

    @property
    def loss_mask(self) -> "torch.Tensor":
        """[r] uint8: 1 for trained tokens; 0 for tokens that are too stale and for all tokens of a filler."""
        return as_tensor(self.arrays.loss_mask)

    @property
    def extras(self) -> "dict[str, torch.Tensor]":
        """The run's extra columns (`record.columns`) by name: a row per token, response token or item, or one
        value per sample; for example `token_rewards` [r] or `routed_experts` [L - 1, layers, experts]."""
        return {name: as_tensor(self._group.extra_of(name, self._index)) for name in self._group.extra}

    def extra_axis(self, name: str) -> str:
        """First axis of an extra column; see `trainer_hook.record.Column`."""
        return self._group.extra[name]

    # --- lengths and outcome ----------------------------------------------------------------------

    @property
    def prompt_length(self) -> int:
        return self._prompt_length

    @property
    def response_length(self) -> int:
        return self._response_length

    @property
    def finish_reason(self) -> str:
        """`stop`, `length` or `abort`."""
        return self._group.head.finish_reasons[self._index]

    @property
    def is_filler(self) -> bool:
        """A repeated sample that equalizes the number of micro-batches; keep it out of the loss."""
        return self._part.filler

    @property
    def reward(self) -> float | None:
        """None for an excluded sample without a reward."""
        reward = self._group.rewards[self._index]
        return None if math.isnan(reward) else reward

    @property
    def is_excluded(self) -> bool:
        """Its loss mask was all 0 when recorded; it does not count in the group's mean and std."""
        return self._index in self._group.head.excluded

    @property
    def group_reward_mean(self) -> float:
        """Over the scored samples of the group that are trained, on all ranks."""
        return self._group.head.reward_mean

    @property
    def group_reward_std(self) -> float:
        """ddof 1; 0 for a single scored sample."""
        return self._group.head.reward_std

    @property
    def group_reward_count(self) -> int:
        return self._group.head.reward_count

    def advantage(self, eps: float = 1e-6) -> float:
        """Reward relative to the group, (reward - mean) / (std + eps): GRPO, arXiv 2402.03300.

        0 for an excluded sample.
        """
        if self.reward is None or self.is_excluded:
            return 0.0
        return (self.reward - self.group_reward_mean) / (self.group_reward_std + eps)

    # --- sampling ---------------------------------------------------------------------------------

    @property
    def sampling_spans(self) -> tuple[SamplingSpan, ...]:
        """Sampling parameters of the response tokens, in order; a single span unless turns differ."""
        return tuple(SamplingSpan(settings, end) for settings, end in self._group.sampling_of(self._index))

    @property
    def temperature(self) -> float:
        """Sampling temperature of the response.

        Raises:
            ValueError: its turns were sampled at different temperatures.
        """
        found = {span.settings.temperature for span in self.sampling_spans}
        if len(found) > 1:
            raise ValueError(
                f"all turns of a sample must have the same temperature; sample {self.member} of group "
                f"{self.group} has {sorted(found)}: use sampling_spans or micro_batch.temperatures"
            )
        return found.pop() if found else self._group.head.sampling.temperature

    # --- weight versions --------------------------------------------------------------------------

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Weight versions of the response tokens, in order."""
        return tuple(VersionSpan(version, end) for version, end in self._group.spans[self._index])

    @property
    def staleness(self) -> int | None:
        """The version being trained minus the oldest version of its tokens; None if a version is unknown."""
        versions = [version for version, _ in self._group.spans[self._index]]
        if UNKNOWN_VERSION in versions:
            return None
        return self._version - min(versions, default=self._version)

    # --- identity ---------------------------------------------------------------------------------

    @property
    def group(self) -> int:
        """Position of the group in the run's endless stream of prompts; unique in a run."""
        return self._group.head.group

    @property
    def member(self) -> int:
        """Index of the sample in its group."""
        return self._group.head.members[self._index]

    @property
    def attempt(self) -> int:
        return self._group.head.attempt

    @property
    def epoch(self) -> int:
        return self._group.head.epoch

    @property
    def prompt_index(self) -> int:
        """Row of the data."""
        return self._group.head.prompt_index

    @property
    def prompt(self) -> str:
        return self._group.head.prompt

    @property
    def label(self) -> Any:
        return self._group.head.label

    @property
    def metadata(self) -> dict[str, Any]:
        """The data row's metadata and the metadata that user code added; a new dict at each call."""
        own = self._group.head.sample_metadata
        return {**self._group.head.metadata, **(own[self._index] if own else {})}

    def __repr__(self) -> str:
        lengths = f"prompt_length={self.prompt_length}, response_length={self.response_length}"
        return f"Sample(group={self.group}, member={self.member}, {lengths}, reward={self.reward})"
