"""Turns prompts into scored samples, for training groups and evaluations.

| a sample | its group |
|---|---|
| fails for good (refused, retries used up, no progress, bad reply) | raises; its other requests end |
| has a reward that failed or timed out | raises: a failed reward is never a number |

Invariant: all executions of a group end before the group; every sample of a successful group is scored.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from fa_rollout.config import Config, Sampling
from fa_rollout.data.row import Row
from fa_rollout.data.tokenizer import Tokenizer
from fa_rollout.generator.base.errors import SampleFailed
from fa_rollout.generator.base.tasks import first_error
from fa_rollout.generator.rollouts.rollout import Rollout
from fa_rollout.generator.turns.job import Job
from fa_rollout.rewards.outcomes import (
    TOKEN_REWARDS,
    FailureReason,
    RewardFailed,
    RewardOutcome,
    Scored,
    read,
)
from fa_rollout.rewards.runner import RewardRunner
from fa_rollout.sample import IntArray, Sample
from fa_rollout.user_code import place
from fa_rollout.user_code.failure import UserCodeFailed

Slot = Callable[[Job], AbstractAsyncContextManager[None]]
"""A slot among the concurrent samples."""
Executions = list[list[Sample]]
"""By member: its samples, several after a fan-out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A prompt, and how many samples to make of it."""

    row: Row
    prompt_ids: IntArray
    num_samples: int
    sampling: Sampling


class Executor:
    """Makes and scores samples."""

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: Tokenizer,
        rollout: Rollout,
        rewards: RewardRunner,
        context_length: int | None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._rollout = rollout
        self._rewards = rewards
        limits = [config.data.max_prompt_tokens, None if context_length is None else context_length - 2]
        self._max_prompt_tokens = min((limit for limit in limits if limit is not None), default=None)

    def encode(self, row: Row) -> IntArray:
        """Ids of a prompt.

        Raises:
            SampleFailed: it is too long for the engines; nothing is sent.
            PromptError: it cannot be tokenized.
        """
        prompt_ids = self._tokenizer.encode_prompt(row, chat_template=self._config.data.chat_template)
        limit = self._max_prompt_tokens
        if limit is not None and len(prompt_ids) > limit:
            raise SampleFailed(f"over-long: a prompt may have {limit} tokens, found {len(prompt_ids)}")
        prompt_ids.setflags(write=False)  # the samples of a group share it
        return prompt_ids

    async def execute(self, job: Job, slot: Slot, order: Order) -> Executions:
        """Run all executions concurrently; the first that fails for good ends the others."""

        async def execute(member: int) -> list[Sample]:
            async with slot(job):
                return await self._rollout.run(job, member, order.row, order.prompt_ids, order.sampling)

        with first_error():
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(execute(member)) for member in range(order.num_samples)]
        num_made = sum(not task.cancelled() for task in running)
        if num_made < len(running):  # a task group ignores cancelled children
            raise SampleFailed(f"samples: {order.num_samples} expected from a prompt, found {num_made}")
        return [task.result() for task in running]

    async def score(self, executions: Executions, *, excludes: bool) -> None:
        """Score the last sample of each execution; its reward applies to all samples of the execution.

        A reward set by a custom generate function is kept.

        Args:
            excludes: skip executions without a trained token; the reward function does not see them.
        """
        _read_own_rewards(sample for execution in executions for sample in execution)
        last = [execution[-1] for execution in executions if not (excludes and is_excluded(execution))]
        unscored = [sample for sample in last if sample.reward is None]
        if unscored:
            await self._ask(last if self._config.reward.group else unscored)
        for execution in executions:
            for sample in execution:
                sample.reward = execution[-1].reward if sample.reward is None else sample.reward

    async def _ask(self, samples: list[Sample]) -> None:
        outcomes = await self._rewards.score(samples)
        for sample, scored in zip(samples, map(_scored, outcomes), strict=True):
            if sample.reward is None:
                sample.reward, sample.reward_parts = scored.value, scored.parts
                if scored.token_rewards is not None:
                    sample.extras[TOKEN_REWARDS] = scored.token_rewards


def votes(executions: Executions) -> list[float]:
    """The rewards for a group's mean and deviation: those of executions with a trained token."""
    last = [execution[-1] for execution in executions if not is_excluded(execution)]
    return [sample.reward for sample in last if sample.reward is not None]


def is_excluded(execution: list[Sample]) -> bool:
    """True if it has tokens but none is trained on."""
    return all(sample.is_excluded for sample in execution)


def _read_own_rewards(samples: Iterable[Sample]) -> None:
    """Check rewards set by a custom generate function, by the rules for reward functions."""
    for sample in samples:
        if sample.reward is not None:
            sample.reward = _scored(read(sample.reward, key=None, num_tokens=0)).value


def _scored(outcome: RewardOutcome) -> Scored:
    if isinstance(outcome, RewardFailed):
        kind = "" if outcome.reason is FailureReason.RAISED else f"{outcome.reason}: "
        raise SampleFailed(f"reward: {kind}{outcome.text}")
    return outcome


def reason_of(error: Exception) -> str:
    """The error text, with its short kind first (the hub counts by it), and the line of user code."""
    if isinstance(error, UserCodeFailed):
        return str(error)
    text = str(error) if isinstance(error, SampleFailed) else f"{type(error).__name__}: {error}"
    at = place.of_error(error)
    return text + place.in_words(at if at is not None and place.is_users(at.file) else None)
