"""What user code sees in the generator: one completion of one prompt, while it is made and scored."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer_hook.record import SamplingSpan, VersionSpan

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
MaskArray = npt.NDArray[np.uint8]


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """Aborted for good: kept as it is."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """One completion. Rewards, filters and custom generate functions get it; arrays are theirs to read."""

    group: int
    member: int
    attempt: int
    epoch: int
    prompt_index: int
    prompt: str | list[dict[str, Any]]
    """As in the data: text, or chat messages."""
    label: Any
    metadata: dict[str, Any]
    """The row's metadata; one dict per sample, free to change."""
    prompt_ids: IntArray
    """[P]"""
    response_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """[R] The server's token ids; never made from text."""
    logprobs: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    """[R] Log-probability of each response token under the policy that sampled it."""
    loss_mask: MaskArray = field(default_factory=lambda: np.empty(0, np.uint8))
    """[R] 1 where the token is trained on."""
    version_spans: list[VersionSpan] = field(default_factory=list)
    sampling_spans: list[SamplingSpan] = field(default_factory=list)
    """How its tokens were sampled, as `append_turn` writes it; empty: as `[sampling]` has it."""
    response: str = ""
    """Decoding of all of response_ids at once, without special tokens."""
    finish_reason: FinishReason | None = None
    reward: float | None = None
    """None for a member that is excluded from its group: then no token is trained either."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    messages: list[list[dict[str, Any]]] = field(default_factory=list)
    """With an agent: the chat messages of each branch of the rollout, the last answer included. Reward
    functions see it; it does not travel to the trainer."""
    extras: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Further arrays by name; those that `record.columns` names travel to the trainer."""

    @property
    def is_excluded(self) -> bool:
        """Whether it has tokens and none of them is in the loss: it does not count in its group then."""
        return len(self.loss_mask) > 0 and not np.any(self.loss_mask)
