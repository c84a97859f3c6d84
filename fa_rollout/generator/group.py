"""One group from prompt to record: N executions, rewards, filter, ring.

| a sample | its group |
|---|---|
| fails for good (refused, retries used up, no progress, broken reply) | failed, its other requests aborted |
| has a reward that failed or timed out | failed: a failed reward is never a number |
| is all right, but the filter says no | filtered |
| is all right | a record |

Invariant: a group is delivered whole, with all its members, or not at all.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import numpy as np

from fa_rollout.client.errors import ClientError
from fa_rollout.config import Config
from fa_rollout.data.chat import PromptError
from fa_rollout.data.prompts import PromptSource
from fa_rollout.data.row import Row
from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.filters import FilterOutcome, GroupFilter, RejectionBound, default_bound
from fa_rollout.generator.assemble import GroupRecord, Identity, build_record
from fa_rollout.generator.errors import SampleFailed
from fa_rollout.generator.job import Ending, Job
from fa_rollout.generator.outbox import Outbox
from fa_rollout.generator.rollout import Rollout
from fa_rollout.generator.tasks import first_error
from fa_rollout.rewards.outcomes import RewardFailed
from fa_rollout.rewards.runner import RewardRunner
from fa_rollout.sample import IntArray, Sample
from shm.errors import RecordTooLarge
from trainer_hook.messages import Settlement

Slot = Callable[[Job], AbstractAsyncContextManager[None]]
"""A place among the samples that engines work on at once."""


class GroupRunner:
    """Carries groups out."""

    def __init__(
        self,
        config: Config,
        *,
        source: PromptSource,
        tokenizer: Tokenizer,
        rollout: Rollout,
        rewards: RewardRunner,
        group_filter: GroupFilter | None,
        outbox: Outbox,
    ) -> None:
        self._config = config
        self._source = source
        self._tokenizer = tokenizer
        self._rollout = rollout
        self._rewards = rewards
        self._filter = group_filter
        bound = config.rollout.max_rejections or default_bound(len(source))
        self._rejections = RejectionBound(config.rollout.filter or "", bound)
        self._outbox = outbox

    async def run(self, job: Job, slot: Slot, deadline: AbstractAsyncContextManager[None]) -> Ending | None:
        """Carry a group out; None when it is committed.

        Raises:
            EndlessRejection: the filter has rejected too many groups in a row.
            Exception: what user code raised in a custom generate function.
        """
        started_s = time.monotonic()
        executions: list[list[Sample]] = []
        try:
            async with deadline:
                row, prompt_ids = self._prompt(job)
                executions = await self._execute(job, slot, row, prompt_ids)
                scores = await self._score(executions)
            samples = [sample for execution in executions for sample in execution]
            rejected = self._judge(executions)
            if rejected is not None:
                return _ending(Settlement.FILTERED, rejected, executions)
            record = self._record(job, row, samples, scores, started_s)
            await self._outbox.put(record)
        except (SampleFailed, ClientError, PromptError, RecordTooLarge) as error:
            return _ending(Settlement.FAILED, _reason(error), executions)
        return None

    def _prompt(self, job: Job) -> tuple[Row, IntArray]:
        """Row and ids of the prompt; one that could never succeed is refused before any request."""
        row = self._source.row(job.assignment.prompt_index)
        prompt_ids = self._tokenizer.encode_prompt(row, chat_template=self._config.data.chat_template)
        limit = self._config.data.max_prompt_tokens
        if limit is not None and len(prompt_ids) > limit:
            raise SampleFailed(f"over-long: a prompt may have {limit} tokens, found {len(prompt_ids)}")
        prompt_ids.setflags(write=False)  # the samples of a group share it
        return row, prompt_ids

    async def _execute(self, job: Job, slot: Slot, row: Row, prompt_ids: IntArray) -> list[list[Sample]]:
        """All executions side by side; the first that fails for good ends the others."""

        async def execute(member: int) -> list[Sample]:
            async with slot(job):
                return await self._rollout.run(job, member, row, prompt_ids)

        with first_error():
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(execute(member))
                    for member in range(self._config.rollout.samples_per_group)
                ]
        return [task.result() for task in running]

    async def _score(self, executions: list[list[Sample]]) -> list[float]:
        """Score the last sample of each execution; its reward counts for all samples of the execution.

        A reward that a custom generate function has set stands.
        """
        last = [execution[-1] for execution in executions]
        unscored = [sample for sample in last if sample.reward is None]
        if unscored:
            scored = last if self._config.reward.group else unscored
            outcomes = await self._rewards.score(scored)
            for sample, outcome in zip(scored, outcomes, strict=True):
                if isinstance(outcome, RewardFailed):
                    raise SampleFailed(f"reward: {outcome.reason}: {outcome.text}")
                if sample.reward is None:
                    sample.reward, sample.reward_parts = outcome.value, outcome.parts
        for execution in executions:
            for sample in execution:
                sample.reward = execution[-1].reward if sample.reward is None else sample.reward
        return [sample.reward for sample in last if sample.reward is not None]

    def _judge(self, executions: list[list[Sample]]) -> str | None:
        """Why the filter rejects a group; None when it keeps it, or there is no filter."""
        if self._filter is None:
            return None
        members = [execution[0] if len(execution) == 1 else execution for execution in executions]
        verdict = self._filter(members)
        if verdict.outcome is FilterOutcome.FAILED:
            raise SampleFailed(f"filter: {verdict.reason}")
        self._rejections.record(verdict)
        return verdict.reason if verdict.outcome is FilterOutcome.REJECTED else None

    def _record(
        self, job: Job, row: Row, samples: list[Sample], scores: list[float], started_s: float
    ) -> GroupRecord:
        assignment = job.assignment
        identity = Identity(
            group=assignment.group,
            attempt=assignment.attempt,
            epoch=assignment.epoch,
            prompt_index=assignment.prompt_index,
            prompt=row.prompt,
            label=row.label,
            metadata=row.metadata,
            temperature=self._config.sampling.temperature,
            top_p=self._config.sampling.top_p,
            started_s=started_s,
        )
        return build_record(samples, identity, scores, time.monotonic())


def _ending(outcome: Settlement, reason: str, executions: list[list[Sample]]) -> Ending:
    lengths = [len(sample.response_ids) for execution in executions for sample in execution]
    return Ending(
        outcome=outcome, reason=reason, mean_response_len=float(np.mean(lengths)) if lengths else 0.0
    )


def _reason(error: Exception) -> str:
    """Short kind first, so that the hub can count by it."""
    return str(error) if isinstance(error, SampleFailed) else f"{type(error).__name__}: {error}"
