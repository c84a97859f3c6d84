"""Scored samples of one group become one record. Pure, but for writing into the arrays of a claim.

In: samples, whole and scored. Out: head bytes, fields, and a fill of the claimed arrays straight from the
samples' own arrays.

Invariant: a record is true or refused. Lengths match, log-probabilities are finite, spans cover, the reward
is a finite number; nothing is patched, and the refusal names the field.

N samples, T tokens, R response tokens, S version spans.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fa_rollout.client.wire.decode import POSITIVE_TOLERANCE
from fa_rollout.generator.base.errors import SampleRefused
from fa_rollout.generator.turns.extras import extra_pieces
from fa_rollout.sample import FinishReason, Sample
from shm import Descriptor, Field
from trainer_hook.messages import Commit
from trainer_hook.record import Column, ExtraColumn, RecordHead, TokenSampling, VersionSpan, columns_of

_VECTORS = {"prompt_ids": "iu", "response_ids": "iu", "logprobs": "f", "loss_mask": "iub"}
"""Fields that must be one-dimensional arrays, and the dtype kinds that each may have."""

_MAX_FLOAT32 = float(np.finfo(np.float32).max)

Pieces = list[npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a group is, and how it was sampled."""

    group: int
    attempt: int
    epoch: int
    prompt_index: int
    prompt: str | list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any]
    sampling: TokenSampling
    """As the run's configuration has it."""
    started_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """A group ready for the ring."""

    head: bytes
    columns: tuple[Pieces, ...]
    """In the order of the schema; each is the concatenation of its pieces."""
    fields: tuple[Field, ...]
    samples: tuple[Sample, ...]

    def fill(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Write all columns into a claim's arrays."""
        for pieces, array in zip(self.columns, arrays, strict=True):
            np.concatenate(pieces, out=array)

    def commit_message(self, descriptor: Descriptor, lowest_open: int) -> Commit:
        """What the hub must know of the record."""
        first = self.samples[0]
        versions = [span.version for sample in self.samples for span in sample.version_spans]
        return Commit(
            incarnation=descriptor.incarnation,
            sequence=descriptor.sequence,
            position=descriptor.position,
            length=descriptor.length,
            lowest_open=lowest_open,
            group=first.group,
            attempt=first.attempt,
            oldest_version=min(versions),
            newest_version=max(versions),
            prompt_lens=[len(sample.prompt_ids) for sample in self.samples],
            response_lens=[len(sample.response_ids) for sample in self.samples],
            loss_lens=[int(np.count_nonzero(sample.loss_mask)) for sample in self.samples],
            spans=[_loss_spans(sample) for sample in self.samples],
            rewards=[None if s.reward is None or s.is_excluded else float(s.reward) for s in self.samples],
        )


def build_record(
    samples: Sequence[Sample],
    identity: Identity,
    rewards: Sequence[float],
    finished_s: float,
    extra: Sequence[ExtraColumn] = (),
) -> GroupRecord:
    """Check every sample and lay the record out.

    Args:
        extra: columns beyond those of every record; their arrays are in `sample.extras`.
        rewards: of the trained executions, for the group's statistics; fewer than samples after a fan-out.

    Raises:
        SampleRefused: a sample breaks a rule of truth.
    """
    for sample in samples:
        check_sample(sample)
    if not any(len(sample.response_ids) for sample in samples):
        raise SampleRefused("response_ids: a group must have at least one sampled token, found none")
    schema = columns_of(extra)
    columns = _columns(samples, schema, extra)
    return GroupRecord(
        head=_encode(_head(samples, identity, rewards, finished_s), "metadata"),
        columns=columns,
        fields=tuple(
            Field(dtype=np.dtype(column.dtype), shape=(sum(len(piece) for piece in pieces), *column.shape))
            for column, pieces in zip(schema, columns, strict=True)
        ),
        samples=tuple(samples),
    )


def check_sample(sample: Sample) -> None:
    """Raise `SampleRefused` unless the fields of a scored sample are whole and agree with each other."""
    for name, kinds in _VECTORS.items():
        array = getattr(sample, name)
        _require(_is_vector(array, kinds), name, f"a one-dimensional array of dtype kind {kinds}", array)
    num_tokens = len(sample.response_ids)
    _require(len(sample.prompt_ids) > 0, "prompt_ids", "at least one id", sample.prompt_ids)
    for name in ("prompt_ids", "response_ids"):
        ids = getattr(sample, name)
        _require(not len(ids) or (ids.min() >= 0 and ids.max() < 2**31), name, "ids from 0 to 2**31 - 1", ids)
    for name in ("logprobs", "loss_mask"):
        found = len(getattr(sample, name))
        _require(found == num_tokens, name, f"one entry for each of {num_tokens} response ids", found)
    if num_tokens:
        _check_tokens(sample)
    _check_spans(sample, num_tokens)
    _check_sampling(sample, num_tokens)
    is_reason = sample.finish_reason in list(FinishReason)
    _require(is_reason, "finish_reason", "one of " + ", ".join(FinishReason), sample.finish_reason)
    reward = sample.reward
    is_number = reward is not None and abs(reward) <= _MAX_FLOAT32  # False for NaN too
    rule = "a finite number, in float32 too, or None where the loss mask is all 0"
    _require(is_number or (reward is None and sample.is_excluded), "reward", rule, reward)


def _check_spans(sample: Sample, num_tokens: int) -> None:
    spans = sample.version_spans
    are_whole = all(
        type(span) is VersionSpan and type(span.version) is type(span.end) is int for span in spans
    )
    _require(are_whole, "version_spans", "VersionSpans of whole numbers", spans)
    ends = [0, *(span.end for span in spans)]
    covers = ends[-1] == num_tokens and all(a < b for a, b in itertools.pairwise(ends))
    _require(covers, "version_spans", f"rising ends up to {num_tokens}", spans)


def _check_sampling(sample: Sample, num_tokens: int) -> None:
    ends = [span.end for span in sample.sampling_spans]
    covers = not ends or (ends[-1] == num_tokens and all(a < b for a, b in itertools.pairwise([0, *ends])))
    _require(covers, "sampling_spans", f"rising ends up to {num_tokens}, or none", sample.sampling_spans)


def _check_tokens(sample: Sample) -> None:
    with np.errstate(over="ignore"):
        logprobs = sample.logprobs.astype(np.float32, copy=False)  # as the record holds them
    is_true = np.isfinite(logprobs).all() and logprobs.max() <= POSITIVE_TOLERANCE
    _require(bool(is_true), "logprobs", "finite and not positive", sample.logprobs)
    is_mask = int(sample.loss_mask.min()) >= 0 and int(sample.loss_mask.max()) <= 1
    _require(is_mask, "loss_mask", "0 or 1", sample.loss_mask)


def _require(holds: bool, field: str, rule: str, found: object) -> None:
    if not holds:
        raise SampleRefused(f"{field}: must be {rule}, found {found!r:.200}")


def _is_vector(array: object, kinds: str) -> bool:
    return isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in kinds


def _columns(
    samples: Sequence[Sample], schema: Sequence[Column], extra: Sequence[ExtraColumn]
) -> tuple[Pieces, ...]:
    spans = [span for sample in samples for span in sample.version_spans]
    by_name: dict[str, Pieces] = {
        "tokens": [part for sample in samples for part in (sample.prompt_ids, sample.response_ids)],
        "cu_seqlens": [_offsets(len(s.prompt_ids) + len(s.response_ids) for s in samples)],
        "cu_responses": [_offsets(len(s.response_ids) for s in samples)],
        "logprobs": [sample.logprobs for sample in samples],
        "loss_mask": [sample.loss_mask for sample in samples],
        "span_versions": [np.array([span.version for span in spans], np.int64)],
        "span_ends": [np.array([span.end for span in spans], np.int32)],
        "cu_spans": [_offsets(len(sample.version_spans) for sample in samples)],
        "rewards": [np.array([np.nan if s.reward is None else s.reward for s in samples], np.float32)],
        **extra_pieces(samples, extra),
    }
    return tuple(
        [piece.astype(column.dtype, copy=False) for piece in by_name[column.name]] for column in schema
    )


def _offsets(lengths: Any) -> npt.NDArray[np.int64]:
    """[0, l0, l0 + l1, ...]; refused where it would pass the column's 32 bits."""
    offsets = np.cumsum([0, *lengths])
    if offsets[-1] >= 2**31:
        raise SampleRefused(f"tokens: a group must have fewer than 2**31 tokens, found {offsets[-1]}")
    return offsets


def _loss_spans(sample: Sample) -> list[tuple[int, int, int]]:
    starts = [0, *(span.end for span in sample.version_spans)]
    return [
        (span.version, span.end, int(np.count_nonzero(sample.loss_mask[start : span.end])))
        for start, span in zip(starts, sample.version_spans, strict=False)
    ]


def _head(
    samples: Sequence[Sample], identity: Identity, rewards: Sequence[float], finished_s: float
) -> RecordHead:
    prompt = identity.prompt
    # As the record holds rewards: of equal ones, none may differ from their mean.
    scores = np.asarray(rewards, np.float32).astype(np.float64)
    return RecordHead(
        group=identity.group,
        attempt=identity.attempt,
        epoch=identity.epoch,
        prompt_index=identity.prompt_index,
        prompt=prompt if isinstance(prompt, str) else msgspec.json.encode(prompt).decode(),
        label=identity.label,
        members=[sample.member for sample in samples],
        finish_reasons=[str(sample.finish_reason) for sample in samples],
        sampling=identity.sampling,
        sampling_spans=_sampling_spans(samples, identity.sampling),
        reward_mean=float(scores.mean()) if len(scores) else 0.0,
        reward_std=float(scores.std(ddof=1)) if len(scores) > 1 else 0.0,
        reward_count=len(scores),
        excluded=[index for index, sample in enumerate(samples) if sample.is_excluded],
        started_s=identity.started_s,
        finished_s=finished_s,
        metadata=identity.metadata,
        sample_metadata=_sample_metadata(samples, identity.metadata),
    )


def _sampling_spans(
    samples: Sequence[Sample], configured: TokenSampling
) -> list[list[tuple[TokenSampling, int]]]:
    """By sample; empty where every token was sampled as the run's configuration has it."""
    spans = [
        [(span.settings, span.end) for span in sample.sampling_spans]
        or [(configured, len(sample.response_ids))]
        for sample in samples
    ]
    return spans if any(settings != configured for of_one in spans for settings, _ in of_one) else []


def _sample_metadata(samples: Sequence[Sample], row: dict[str, Any]) -> list[dict[str, Any]]:
    """What each sample has beyond the row's metadata: what user code changed, and the reward's parts."""
    plain = _encode(row, "metadata")
    changed = [{} if _encode(s.metadata, "metadata") == plain else s.metadata for s in samples]
    return [
        own | ({"reward_parts": sample.reward_parts} if sample.reward_parts else {})
        for own, sample in zip(changed, samples, strict=True)
    ]


def _encode(value: Any, field: str) -> bytes:
    try:
        return msgspec.msgpack.encode(value, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SampleRefused(f"{field}: must be plain data (numbers, text, lists, dicts): {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"found a {type(value).__name__}")
