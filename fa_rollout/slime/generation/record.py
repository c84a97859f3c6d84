"""A finished group of slime's samples as a ring record, with the attributes that the ring does not carry.

Invariant: the rollout manager rebuilds exactly the samples that the generator had, attribute by attribute. A
sample whose lists do not match its response length is refused.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fa_rollout.generator.records.assemble import GroupRecord, Identity, build_record
from fa_rollout.sample import FinishReason, Sample
from fa_rollout.slime.generation.group_context import GroupContext
from fa_rollout.slime.wire import flatten
from shm import Descriptor, Field
from trainer_hook.messages import Commit
from trainer_hook.record import TokenSampling, VersionSpan

_FINISH = {"completed": FinishReason.STOP, "truncated": FinishReason.LENGTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlimeRecord:
    """A group ready for the ring, with its other attributes in `rest`."""

    record: GroupRecord
    rest: bytes

    @property
    def head(self) -> bytes:
        return self.record.head

    @property
    def fields(self) -> tuple[Field, ...]:
        return self.record.fields

    def fill(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Write all columns into a claim's arrays."""
        self.record.fill(arrays)

    def commit_message(self, descriptor: Descriptor, lowest_open: int) -> Commit:
        """The commit for the hub, with `rest` as the payload that it forwards."""
        message = self.record.commit_message(descriptor, lowest_open)
        return msgspec.structs.replace(message, payload=self.rest)


def slime_record(
    group: Sequence[Any],
    context: GroupContext,
    args: Any,
    *,
    rest: bytes,
    started_s: float,
    finished_s: float,
) -> SlimeRecord:
    """Lay out a group, with the samples of a fan-out in sequence.

    Raises:
        SampleRefused: a sample's lists differ in length.
    """
    assignment = context.job.assignment
    samples = [_sample(sample, member, context, args) for member, sample in enumerate(flatten(group))]
    identity = Identity(
        group=assignment.group,
        attempt=assignment.attempt,
        epoch=assignment.epoch,
        prompt_index=assignment.prompt_index,
        prompt="",
        label=None,
        metadata={},
        sampling=TokenSampling(temperature=float(args.rollout_temperature), top_p=float(args.rollout_top_p)),
        started_s=started_s,
    )
    rewards = [float(sample.reward or 0.0) for sample in samples if not sample.is_excluded]
    return SlimeRecord(record=build_record(samples, identity, rewards, finished_s), rest=rest)


def _sample(sample: Any, member: int, context: GroupContext, args: Any) -> Sample:
    assignment = context.job.assignment
    tokens = _ints(sample.tokens)
    num_prompt = len(tokens) - sample.response_length
    return Sample(
        group=assignment.group,
        member=member,
        attempt=assignment.attempt,
        epoch=assignment.epoch,
        prompt_index=assignment.prompt_index,
        prompt="",
        label=None,
        metadata={},
        prompt_ids=tokens[:num_prompt],
        response_ids=tokens[num_prompt:],
        logprobs=_floats(sample.rollout_log_probs, sample.response_length),
        loss_mask=_mask(sample.loss_mask, sample.response_length),
        version_spans=_spans(sample, context),
        finish_reason=_FINISH.get(sample.status.value, FinishReason.ABORT),
        reward=_number(sample, args),
    )


def _ints(values: Any) -> npt.NDArray[np.int32]:
    if isinstance(values, list):
        return np.frombuffer(array("i", values), np.int32)
    return np.asarray(values, np.int32)


def _floats(values: Any, length: int) -> npt.NDArray[np.float32]:
    """Log-probabilities; zeros if there are none, which `rest` records."""
    if values is None:
        return np.zeros(length, np.float32)
    if isinstance(values, list):
        return np.frombuffer(array("f", values), np.float32)
    return np.asarray(values, np.float32)


def _mask(values: Any, length: int) -> npt.NDArray[np.uint8]:
    if values is None:
        return np.ones(length, np.uint8)
    if isinstance(values, list):
        # Nearly all masks are all ones, and counting takes a tenth of the time of converting.
        is_whole = len(values) == length == values.count(1)
        return np.ones(length, np.uint8) if is_whole else np.frombuffer(bytes(values), np.uint8)
    return np.asarray(values, np.uint8)


def _spans(sample: Any, context: GroupContext) -> list[VersionSpan]:
    """Exact spans if our client made all tokens; else one span of the oldest version in any answer."""
    length = sample.response_length
    if length == 0:
        return []
    exact = context.spans.get(id(sample))
    if exact and exact[-1].end == length:
        return exact
    return [VersionSpan(oldest_version(sample, context), length)]


def oldest_version(sample: Any, context: GroupContext) -> int:
    """The oldest version that a sample's answers reported; unknown if one came from an engine that still has
    its initial weights while others were updated."""
    versions = context.book.follow_answers(sample.weight_versions)
    return min(versions) if versions and context.book.has_numbers else context.started_version


def _number(sample: Any, args: Any) -> float:
    """The reward for the hub's statistics; slime itself reads it from `rest`, whatever its type."""
    value = sample.reward
    if isinstance(value, dict):
        value = value.get(args.reward_key) if args.reward_key else None
    number = float(value) if isinstance(value, int | float) else 0.0
    return number if np.isfinite(number) else 0.0
