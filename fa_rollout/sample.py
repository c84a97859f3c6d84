"""`Sample`: one completion of one prompt, as user code in the generator sees it."""

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
    """Aborted and not continued; the tokens sampled so far are kept."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """One completion, passed to rewards, filters and generate functions. Its arrays are read-only."""

    group: int
    member: int
    attempt: int
    epoch: int
    prompt_index: int
    prompt: str | list[dict[str, Any]]
    """Text or chat messages, as in the data set."""
    label: Any
    metadata: dict[str, Any]
    """A copy of the row's metadata; user code may change it."""
    prompt_ids: IntArray
    """[P]"""
    response_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """[R] Token ids as the engine returned them, never re-encoded from text."""
    logprobs: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    """[R] Log-probability of each response token under the policy that sampled it."""
    loss_mask: MaskArray = field(default_factory=lambda: np.empty(0, np.uint8))
    """[R] 1 for tokens that are trained on, 0 otherwise."""
    version_spans: list[VersionSpan] = field(default_factory=list)
    sampling_spans: list[SamplingSpan] = field(default_factory=list)
    """Sampling settings of its tokens, written by `append_turn`. Empty means the run's `[sampling]`."""
    response: str = ""
    """Text of response_ids, decoded in one call without special tokens."""
    finish_reason: FinishReason | None = None
    reward: float | None = None
    """None before scoring, and for a sample excluded from its group (none of its tokens is trained on)."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    messages: list[list[dict[str, Any]]] = field(default_factory=list)
    """Agent rollouts only: the chat messages of each branch, including the last answer. Reward functions can
    read them; they are not sent to the trainer."""
    extras: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """More arrays by name. Those listed in `record.columns` are sent to the trainer."""

    @property
    def is_excluded(self) -> bool:
        """True if it has tokens but none is trained on; the group's statistics then ignore it."""
        return len(self.loss_mask) > 0 and not np.any(self.loss_mask)
