"""Scoring in the event loop: async functions, and plain ones that take microseconds."""

import asyncio
import logging

from fa_rollout.rewards.call import Shape, raised
from fa_rollout.rewards.function import Kind, RewardFunction, kind_of
from fa_rollout.rewards.outcomes import FailureReason, Outcomes, RewardFailed, RewardOutcome
from fa_rollout.sample import Sample

logger = logging.getLogger(__name__)

CANCEL_S = 1.0
"""How long a cancelled coroutine of the user's may take to end before it is left behind."""


class LoopScorer:
    """Calls the function in the loop; an async call that runs too long is cancelled."""

    def __init__(self, function: RewardFunction, shape: Shape, *, timeout_s: float) -> None:
        self._function = function
        self._shape = shape
        self._timeout_s = timeout_s
        self._is_async = kind_of(function) is Kind.ASYNC
        self._tasks: set[asyncio.Task[Outcomes]] = set()
        self._closed = False

    async def score(self, samples: list[Sample]) -> list[RewardOutcome]:
        """One outcome a sample, in order."""
        calls = self._shape.items(samples)
        answers = await self._await_all(calls) if self._is_async else [self._call(call) for call in calls]
        outcomes: list[RewardOutcome] = []
        for call, answer in zip(calls, answers, strict=True):
            outcomes += [answer] * len(call) if isinstance(answer, RewardFailed) else answer
        return outcomes

    async def close(self) -> None:
        """Cancel what runs; coroutines that do not end within `CANCEL_S` are left behind, with an error."""
        self._closed = True
        await self._cancel(set(self._tasks))

    def _call(self, samples: list[Sample]) -> Outcomes:
        try:
            return self._shape.outcomes(self._function(self._shape.argument(samples)), samples)
        except KeyboardInterrupt:
            raise
        # The user's function may raise anything, timeouts that are no `Exception` too: a failed reward.
        except BaseException as error:
            return raised(error)

    async def _call_async(self, samples: list[Sample]) -> Outcomes:
        try:
            return self._shape.outcomes(await self._function(self._shape.argument(samples)), samples)
        except (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit):
            raise
        # As in `_call`.
        except BaseException as error:
            return raised(error)

    async def _await_all(self, calls: list[list[Sample]]) -> list[Outcomes]:
        """Wait beside the user's coroutines, not in them: one that swallows cancellation must not hold us."""
        if self._closed or not calls:
            return [RewardFailed(reason=FailureReason.CLOSED, text="the runner is closed")] * len(calls)
        tasks = [asyncio.create_task(self._call_async(call)) for call in calls]
        self._tasks.update(tasks)
        for task in tasks:
            task.add_done_callback(self._tasks.discard)
        try:
            _, late = await asyncio.wait(tasks, timeout=self._timeout_s)
            await self._cancel(late)
        except asyncio.CancelledError:
            await self._cancel(set(tasks))
            raise
        return [self._too_late() if task in late else self._read(task) for task in tasks]

    def _too_late(self) -> RewardFailed:
        text = f"the reward ran longer than reward.timeout_s = {self._timeout_s:g} s and was cancelled"
        return RewardFailed(reason=FailureReason.TIMEOUT, text=text)

    def _read(self, task: asyncio.Task[Outcomes]) -> Outcomes:
        if not task.cancelled():
            return task.result()
        reason = FailureReason.CLOSED if self._closed else FailureReason.RAISED
        return RewardFailed(reason=reason, text="the reward was cancelled before it returned")

    async def _cancel(self, tasks: set[asyncio.Task[Outcomes]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=CANCEL_S)
            for task in left:
                logger.error("reward ignores its cancellation and is left behind task=%s", task.get_name())
