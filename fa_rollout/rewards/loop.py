"""Scores in the event loop: async functions, and plain functions that take microseconds."""

from typing import Any

from fa_rollout.rewards.call import Shape, bad_value
from fa_rollout.rewards.function import RewardFunction
from fa_rollout.rewards.outcomes import FailureReason, Outcomes, RewardFailed, RewardOutcome, RewardsLost
from fa_rollout.sample import Sample
from fa_rollout.user_code.call import UserCall
from fa_rollout.user_code.deadline import Deadline
from fa_rollout.user_code.failure import UserCodeFailed, UserCodeTimedOut


class LoopScorer:
    """Calls the function in the loop and cancels calls that exceed the time limit."""

    def __init__(
        self, function: RewardFunction, shape: Shape, *, timeout_s: float, is_remote: bool = False
    ) -> None:
        """`is_remote`: the function calls a server; it receives its deadline, to pause between attempts."""
        self._function = function
        self._shape = shape
        self._timeout_s = timeout_s
        self._calls: set[UserCall[Any]] = set()
        self._is_remote = is_remote
        self._closed = False

    async def score(self, samples: list[Sample]) -> list[RewardOutcome]:
        """One outcome a sample, in order.

        Raises:
            RewardsLost: the reward server answers no request.
        """
        items = self._shape.items(samples)
        if self._closed:
            return [RewardFailed(reason=FailureReason.CLOSED, text="the runner is closed")] * len(samples)
        calls = [self._begin(item) for item in items]
        self._calls.update(calls)
        outcomes: list[RewardOutcome] = []
        try:
            for call, item in zip(calls, items, strict=True):
                answer = await self._answer(call, item)
                outcomes += [answer] * len(item) if isinstance(answer, RewardFailed) else answer
        finally:
            await self._end(calls)
        return outcomes

    async def close(self) -> None:
        """Cancel all calls; those that do not end in time are abandoned, with an error in the log."""
        self._closed = True
        await self._end(list(self._calls))

    def _begin(self, item: list[Sample]) -> UserCall[Any]:
        rule = f"the reward ran longer than reward.timeout_s = {self._timeout_s:g} s and was cancelled"
        deadline = Deadline(self._timeout_s, rule)
        further = (deadline,) if self._is_remote else ()
        return UserCall(
            "reward",
            lambda: self._function(self._shape.argument(item), *further),
            function=self._function,
            deadline=deadline,
            passes=(RewardsLost,) if self._is_remote else (),
        )

    async def _answer(self, call: UserCall[Any], item: list[Sample]) -> Outcomes:
        try:
            result = await call.result()
        except UserCodeFailed as error:
            reason = FailureReason.TIMEOUT if isinstance(error, UserCodeTimedOut) else FailureReason.RAISED
            reason = FailureReason.CLOSED if self._closed and call.is_cancelled else reason
            return RewardFailed(reason=reason, text=error.without_what)
        try:
            return self._shape.outcomes(result, item, self._function)
        except Exception as error:  # reading a user-defined object can raise anything
            return bad_value(error, self._function)

    async def _end(self, calls: list[UserCall[Any]]) -> None:
        for call in calls:
            call.cancel()
        for call in calls:
            await call.end()
        self._calls.difference_update(calls)
