"""One completion as the trainer sees it: numbers, text, and views of its tokens in the ring.

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
    """A sample in numpy: read-only views of the ring, except for a mask that the batch has changed."""

    tokens: npt.NDArray[np.int32]
    """[L]"""
    logprobs: npt.NDArray[np.float32]
    """[r]"""
    loss_mask: npt.NDArray[np.uint8]
    """[r]"""
    extras: dict[str, npt.NDArray[Any]]
    """Extra columns by name, as `Sample.extras` has them."""


class Sample:
    """One completion of one prompt.

    Tensors are zero-copy and read-only: an in-place write to one is a segmentation fault; `clone()` first.
    They stay valid for as long as they are referenced, also after the `with` block of their batch, but hold
    their record in the ring meanwhile. Attributes that make tensors raise `StaleView` after the block;
    numbers and text stay.
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
        """The mask of the record, as the batch changed it; a record itself is never altered."""
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
        """[r] float32: log-probability of each response token under the policy that sampled it, of
        softmax(logits / temperature); see `sampling_spans`."""
        return as_tensor(self.arrays.logprobs)

    @property
    def loss_mask(self) -> "torch.Tensor":
        """[r] uint8: 1 where the token is trained on; all 0 for a filler, 0 where tokens are too stale."""
        return as_tensor(self.arrays.loss_mask)

    @property
    def extras(self) -> "dict[str, torch.Tensor]":
        """The run's extra columns (`record.columns`) by name: a row per token, response token or item, or the
        one value of the sample, such as `token_rewards` [r] or `routed_experts` [L - 1, layers, experts]."""
        return {name: as_tensor(self._group.extra_of(name, self._index)) for name in self._group.extra}

    def extra_axis(self, name: str) -> str:
        """What the first axis of an extra column counts; see `trainer_hook.record.Column`."""
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
        """A stand-in that evens out the number of micro-batches: nothing of it may reach the loss."""
        return self._part.filler

    @property
    def reward(self) -> float | None:
        """None for a member that was excluded without one."""
        reward = self._group.rewards[self._index]
        return None if math.isnan(reward) else reward

    @property
    def is_excluded(self) -> bool:
        """Its loss mask was all 0 when it was recorded: it does not count in its group's figures."""
        return self._index in self._group.head.excluded

    @property
    def group_reward_mean(self) -> float:
        """Over the scored samples of the group that are trained, also those on other ranks."""
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

        0 for an excluded member.
        """
        if self.reward is None or self.is_excluded:
            return 0.0
        return (self.reward - self.group_reward_mean) / (self.group_reward_std + eps)

    # --- how it was sampled -----------------------------------------------------------------------

    @property
    def sampling_spans(self) -> tuple[SamplingSpan, ...]:
        """How the response tokens were sampled, in order; one span unless turns differ."""
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
                f"a sample has one temperature only if all of its turns have; sample {self.member} of group "
                f"{self.group} has {sorted(found)}: use sampling_spans, or micro_batch.temperatures"
            )
        return found.pop() if found else self._group.head.sampling.temperature

    # --- weight versions --------------------------------------------------------------------------

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Which weights sampled which response tokens, in order."""
        return tuple(VersionSpan(version, end) for version, end in self._group.spans[self._index])

    @property
    def staleness(self) -> int | None:
        """Version that trains it minus the oldest among its tokens; None if an engine did not tell."""
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
        """The row's metadata and what user code added for this sample; a new dict at each call."""
        own = self._group.head.sample_metadata
        return {**self._group.head.metadata, **(own[self._index] if own else {})}

    def __repr__(self) -> str:
        lengths = f"prompt_length={self.prompt_length}, response_length={self.response_length}"
        return f"Sample(group={self.group}, member={self.member}, {lengths}, reward={self.reward})"
