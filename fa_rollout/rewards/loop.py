"""Scoring in the event loop: async functions, and plain ones that take microseconds."""

import asyncio
import inspect
import logging
from typing import Any

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
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def score(self, samples: list[Sample]) -> list[RewardOutcome]:
        """One outcome a sample, in order."""
        calls = self._shape.items(samples)
        if not self._is_async:
            answers = [self._call(call) for call in calls]
        else:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._await(call)) for call in calls]
            answers = [task.result() for task in tasks]
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
            result = self._function(self._shape.argument(samples))
        except KeyboardInterrupt:
            raise
        # The user's function may raise anything, timeouts that are no `Exception` too: a failed reward.
        except BaseException as error:
            return raised(error)
        if inspect.isawaitable(result):
            text = "the function returned an awaitable; write it as `async def`, so that it is awaited"
            return RewardFailed(reason=FailureReason.BAD_VALUE, text=text)
        return self._shape.outcomes(result, samples)

    async def _await(self, samples: list[Sample]) -> Outcomes:
        """Wait beside the user's coroutine, not in it: one that swallows cancellation must not hold us."""
        if self._closed:
            return RewardFailed(reason=FailureReason.CLOSED, text="the runner is closed")
        task = asyncio.ensure_future(self._function(self._shape.argument(samples)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            await self._cancel({task})
            raise
        if not task.done():
            await self._cancel({task})
            text = f"the reward ran longer than reward.timeout_s = {self._timeout_s:g} s and was cancelled"
            return RewardFailed(reason=FailureReason.TIMEOUT, text=text)
        return self._read(task, samples)

    def _read(self, task: asyncio.Task[Any], samples: list[Sample]) -> Outcomes:
        if task.cancelled():
            closed = FailureReason.CLOSED if self._closed else FailureReason.RAISED
            return RewardFailed(reason=closed, text="the reward was cancelled before it returned")
        error = task.exception()
        return raised(error) if error is not None else self._shape.outcomes(task.result(), samples)

    async def _cancel(self, tasks: set[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=CANCEL_S)
            for task in left:
                logger.error("reward ignores its cancellation and is left behind task=%s", task.get_name())
