"""Head starts of groups: what samples under way have, kept for a checkpoint, and what a checkpoint kept.

In: running jobs; entries of a file. Out: a file; records for the ring, and drafts to go on from.

Invariant: tokens are used only for the very prompt and sampling parameters that they were sampled from. What
cannot be used lets a group begin from nothing; it never fails one, nor the run.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fa_rollout.config import Config
from fa_rollout.generator.base.gate import Gate
from fa_rollout.generator.turns.job import HeadStart, Job
from fa_rollout.generator.turns.requester import Requester
from fa_rollout.generator.turns.turn import Draft
from fa_rollout.process.own_threads import in_thread
from fa_rollout.sample import FinishReason, IntArray
from fa_rollout.user_code.failure import in_one_line
from shm import Descriptor, Field
from trainer_hook.calls.kept import (
    Kept,
    KeptArray,
    KeptBlock,
    KeptGroup,
    KeptPartial,
    KeptRecord,
    KeptSample,
    pack,
    read,
)
from trainer_hook.messages import Commit, KeptKind, PartialsSaved, SavePartials
from trainer_hook.record import VersionSpan, columns_of, schema_fingerprint

logger = logging.getLogger(__name__)

HOLD = "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredRecord:
    """A group as it was in an earlier ring."""

    kept: KeptRecord
    attempt: int
    """Of the group now; the record's own head tells the one that sampled it."""

    @property
    def head(self) -> bytes:
        return self.kept.head

    @property
    def fields(self) -> tuple[Field, ...]:
        return tuple(Field(dtype=np.dtype(array.dtype), shape=array.shape) for array in self.kept.arrays)

    def fill(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Write all columns into a claim's arrays."""
        for target, array in zip(arrays, self.kept.arrays, strict=True):
            target[...] = array.array

    @property
    def longest(self) -> int:
        """Tokens of its longest sample, the prompt's included."""
        commit = self.kept.commit
        return max(map(sum, zip(commit.prompt_lens, commit.response_lens, strict=True)), default=0)

    def commit_message(self, descriptor: Descriptor, lowest_open: int) -> Commit:
        """What the hub must know of the record."""
        return msgspec.structs.replace(
            self.kept.commit, **descriptor._asdict(), lowest_open=lowest_open, attempt=self.attempt
        )


class HeadStarts:
    """Reads what a checkpoint kept."""

    def __init__(self, config: Config) -> None:
        self._schema = schema_fingerprint(columns_of(config.record.columns))
        self._is_ours = not config.rollout.is_custom and config.rollout.partial == "resume"
        self._conditions = Conditions(config)

    async def record(self, job: Job) -> RestoredRecord | None:
        """The whole group, where it was kept whole."""
        kept = await self._read(job.head_start, KeptKind.RECORD)
        if not isinstance(kept, KeptRecord):
            return None
        if kept.schema != self._schema:
            logger.warning("event=kept_record_of_other_columns group=%d", job.assignment.group)
            return None
        return RestoredRecord(kept=kept, attempt=job.assignment.attempt)

    async def put_drafts(self, job: Job) -> None:
        """Give a job the tokens that were kept for its samples; to be called once it has its prompt ids."""
        kept = await self._read(job.head_start, KeptKind.PARTIAL) if self._is_ours else None
        if not isinstance(kept, KeptPartial) or job.prompt_ids is None:
            return
        if kept.conditions != self._conditions.of(job.prompt_ids):
            logger.info("event=kept_tokens_of_other_conditions group=%d", job.assignment.group)
            return
        job.drafts = {sample.member: _draft(sample) for sample in kept.samples}

    async def _read(self, start: HeadStart | None, kind: KeptKind) -> Kept | None:
        if start is None or start.entry.kind is not kind:
            return None
        try:
            return await in_thread(read, start.path, start.entry)
        except (OSError, ValueError) as error:
            logger.warning("event=kept_group_unreadable group=%d error=%s", start.entry.group, error)
            return None


class Conditions:
    """What tokens are sampled from, as a fingerprint."""

    def __init__(self, config: Config) -> None:
        settings = msgspec.structs.replace(config.sampling, seed=None)
        self._settings = repr(settings).encode()

    def of(self, prompt_ids: IntArray) -> str:
        """Of one prompt."""
        text = self._settings + prompt_ids.astype("<i4").tobytes()
        return hashlib.blake2b(text, digest_size=8).hexdigest()


class PartialKeeper:
    """Writes the tokens of samples under way to a file."""

    def __init__(
        self, config: Config, requester: Requester, sending: Gate, *, warn: Callable[[str], None]
    ) -> None:
        """`warn`: takes why a file was not written."""
        self._warn = warn
        self._conditions = Conditions(config)
        self._requester = requester
        self._sending = sending

    async def save(self, order: SavePartials, jobs: Callable[[], Iterable[Job]]) -> PartialsSaved:
        """Write the file, with what engines gave back so far, or after they gave back all.

        Whatever goes wrong: the order is answered, and the checkpoint has no unfinished groups.
        """
        running = list(jobs())
        try:
            block = await self._block(order, jobs)
            await in_thread(Path(order.path).write_bytes, block.data)
        except Exception as error:  # a full disk, a bad path, arrays of the user's own
            self._warn(f"the tokens of unfinished groups are not in the checkpoint: {in_one_line(error)}")
            with contextlib.suppress(OSError, ValueError):
                await in_thread(Path(order.path).unlink, missing_ok=True)
            return PartialsSaved(number=order.number, num_groups=0, num_left_out=len(running))
        return PartialsSaved(
            number=order.number, num_groups=block.num_groups, num_left_out=block.num_left_out
        )

    async def _block(self, order: SavePartials, jobs: Callable[[], Iterable[Job]]) -> KeptBlock:
        try:
            if order.interrupt_s:
                await self._interrupt(order.interrupt_s)
            return pack(self._groups(jobs()), limit_bytes=order.limit_bytes)
        finally:
            self._sending.release(HOLD)

    async def _interrupt(self, limit_s: float) -> None:
        self._sending.hold(HOLD)
        try:
            async with asyncio.timeout(limit_s):
                await self._requester.abort_all()
                await self._requester.settled()
        except TimeoutError:
            logger.warning("event=interrupt_timed_out num_requests=%d", self._requester.num_under_way)

    def _groups(self, jobs: Iterable[Job]) -> Iterator[KeptGroup]:
        for job in sorted(jobs, key=lambda job: job.assignment.group):
            samples = [_sample(member, draft) for member, draft in job.drafts.items() if draft.num_tokens]
            if samples and job.prompt_ids is not None:
                kept = KeptPartial(conditions=self._conditions.of(job.prompt_ids), samples=samples)
                yield KeptGroup.of(job.assignment.group, kept)


def _sample(member: int, draft: Draft) -> KeptSample:
    return KeptSample(
        member=member,
        ids=KeptArray.of(np.concatenate(draft.ids)),
        logprobs=KeptArray.of(np.concatenate(draft.logprobs)),
        spans=[(span.version, span.end) for span in draft.spans],
        finish=draft.reason,
        extras={name: KeptArray.of(array) for name, array in draft.extras.items()},
    )


def _draft(sample: KeptSample) -> Draft:
    ids = sample.ids.array
    return Draft(
        ids=[ids],
        logprobs=[sample.logprobs.array],
        spans=[VersionSpan(version, end) for version, end in sample.spans],
        num_tokens=len(ids),
        kept_extras={name: array.array for name, array in sample.extras.items()},
        reason=None if sample.finish is None else FinishReason(sample.finish),
    )
