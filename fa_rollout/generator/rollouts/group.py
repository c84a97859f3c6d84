"""One group from prompt to record: N executions, rewards, filter, ring.

| its samples | the group |
|---|---|
| fail, or have a failed reward (see `execution`) | failed |
| are complete, but the filter rejects them or no token is trained | filtered |
| are complete | a record |

Invariant: a group is delivered with all its members or not at all.
"""

import logging
import time
from contextlib import AbstractAsyncContextManager

import numpy as np

from fa_rollout.client.base.errors import ClientError, EngineUnavailable
from fa_rollout.config import Config
from fa_rollout.data.chat import PromptError
from fa_rollout.data.prompts import PromptSource
from fa_rollout.data.row import Row
from fa_rollout.filters import FilterOutcome, GroupFilter, RejectionBound, Verdict, default_bound
from fa_rollout.generator.base.errors import SampleFailed
from fa_rollout.generator.records.assemble import GroupRecord, Identity, build_record
from fa_rollout.generator.records.outbox import Outbox
from fa_rollout.generator.records.partials import HeadStarts, RestoredRecord
from fa_rollout.generator.records.sample_log import SampleLog
from fa_rollout.generator.rollouts.execution import (
    Executions,
    Executor,
    Order,
    Slot,
    is_excluded,
    reason_of,
    votes,
)
from fa_rollout.generator.turns.job import GroupEnding, Job
from fa_rollout.generator.turns.sampling import base_params, token_sampling
from fa_rollout.records.sample_file import COMMITTED
from fa_rollout.sample import Sample
from fa_rollout.user_code.call import run as run_user_code
from fa_rollout.user_code.failure import UserCodeFailed
from shm.errors import RecordTooLarge
from trainer_hook.messages import Settlement

logger = logging.getLogger(__name__)

NOTHING_TRAINED = "no member is trained: every loss mask is 0"


class GroupRunner:
    """Runs groups."""

    def __init__(
        self,
        config: Config,
        *,
        source: PromptSource,
        executor: Executor,
        group_filter: GroupFilter | None,
        outbox: Outbox,
        log: SampleLog,
    ) -> None:
        self._config = config
        self._max_tokens = config.trainer.max_tokens_per_micro_batch
        self._source = source
        self._executor = executor
        self._filter = group_filter
        bound = config.rollout.max_rejections or default_bound(len(source))
        self._rejections = RejectionBound(config.rollout.filter or "loss_mask", bound)
        self._outbox = outbox
        self._log = log
        self._head_starts = HeadStarts(config)

    async def run(
        self, job: Job, slot: Slot, deadline: AbstractAsyncContextManager[None]
    ) -> GroupEnding | None:
        """Run a group; None if it is committed.

        Raises:
            EndlessRejection: the filter rejected too many groups in a row.
            EngineUnavailable: no engine answers any request.
        """
        job.started_s = time.monotonic()
        executions: Executions = []
        if await self._restore(job):
            return None
        try:
            async with deadline:
                row = self._source.row(job.assignment.prompt_index)
                job.label = row.label
                order = self._order(row)
                job.prompt_ids = order.prompt_ids
                await self._head_starts.put_drafts(job)
                executions = await self._executor.execute(job, slot, order)
                self._check_lengths(executions)
                await self._executor.score(executions, excludes=True)
            samples = [sample for execution in executions for sample in execution]
            rejected = await self._judge(executions)
            if rejected is not None:
                return _ending(Settlement.FILTERED, rejected, executions)
            record = self._record(job, row, samples, votes(executions))
            await self._outbox.put(record)
            self._log.write(job, COMMITTED, samples)
        except EngineUnavailable:
            raise  # no group is to blame
        except (SampleFailed, UserCodeFailed, ClientError, PromptError, RecordTooLarge) as error:
            return _ending(Settlement.FAILED, reason_of(error), executions)
        return None

    async def _restore(self, job: Job) -> bool:
        """Put a finished group from a checkpoint back into the ring; False if it has none."""
        record = await self._head_starts.record(job)
        if record is None or not self._is_trainable(record):
            return False
        try:
            await self._outbox.put(record)
        except RecordTooLarge as error:
            logger.warning("event=kept_record_too_large group=%d error=%s", job.assignment.group, error)
            return False
        return True

    def _is_trainable(self, record: RestoredRecord) -> bool:
        """Whether each sample fits a micro-batch; the limit may have changed since the checkpoint."""
        return self._max_tokens is None or record.longest <= self._max_tokens

    def _check_lengths(self, executions: Executions) -> None:
        """Refuse samples that fit no micro-batch: they would stop the trainer, also after a resume."""
        for sample in (sample for samples in executions for sample in samples):
            self._check_length("sample", len(sample.prompt_ids) + len(sample.response_ids))

    def _check_length(self, what: str, num_tokens: int) -> None:
        limit = self._max_tokens
        if limit is not None and num_tokens > limit:
            allowed = f"{limit} tokens (trainer.max_tokens_per_micro_batch)"
            raise SampleFailed(f"over-long: a {what} may have {allowed}, found {num_tokens}")

    def _order(self, row: Row) -> Order:
        prompt_ids = self._executor.encode(row)
        self._check_length("prompt and its answer", len(prompt_ids) + 1)
        return Order(
            row=row,
            prompt_ids=prompt_ids,
            num_samples=self._config.rollout.samples_per_group,
            sampling=self._config.sampling,
        )

    async def _judge(self, executions: Executions) -> str | None:
        """Why a group is rejected, by the filter or since no token is trained; None if it is kept."""
        verdict = Verdict(outcome=FilterOutcome.KEPT)
        if (judge := self._filter) is not None:
            members = [execution[0] if len(execution) == 1 else execution for execution in executions]
            verdict = await run_user_code("filter", lambda: judge(members), function=judge.function)
        if verdict.outcome is FilterOutcome.KEPT and all(map(is_excluded, executions)):
            verdict = Verdict(outcome=FilterOutcome.REJECTED, reason=NOTHING_TRAINED)
        self._rejections.record(verdict)
        return verdict.reason if verdict.outcome is FilterOutcome.REJECTED else None

    def _record(self, job: Job, row: Row, samples: list[Sample], scores: list[float]) -> GroupRecord:
        assignment = job.assignment
        identity = Identity(
            group=assignment.group,
            attempt=assignment.attempt,
            epoch=assignment.epoch,
            prompt_index=assignment.prompt_index,
            prompt=row.prompt,
            label=row.label,
            metadata=row.metadata,
            sampling=token_sampling(base_params(self._config.sampling)),
            started_s=job.started_s,
        )
        extra = self._config.record.columns
        return build_record(samples, identity, scores, time.monotonic(), extra)


def _ending(outcome: Settlement, reason: str, executions: Executions) -> GroupEnding:
    samples = tuple(sample for execution in executions for sample in execution)
    lengths = [len(sample.response_ids) for sample in samples]
    return GroupEnding(
        outcome=outcome,
        reason=reason,
        mean_response_len=float(np.mean(lengths)) if lengths else 0.0,
        samples=samples,
    )
