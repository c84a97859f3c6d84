"""The reward function's argument, and how its results and exceptions become outcomes."""

import inspect
from dataclasses import dataclass
from typing import Any

from fa_rollout.rewards.outcomes import FailureReason, Outcomes, RewardFailed, read, read_group
from fa_rollout.sample import Sample
from fa_rollout.user_code import place
from fa_rollout.user_code.failure import in_one_line, told


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the function takes and returns."""

    group: bool
    """It maps a list of samples to a list of rewards; otherwise one sample to one reward."""
    key: str | None
    """It returns dicts; this entry is the reward."""

    def items(self, samples: list[Sample]) -> list[list[Sample]]:
        """The samples of each call that scores a group."""
        return [samples] if self.group else [[sample] for sample in samples]

    def argument(self, samples: list[Sample]) -> Any:
        """The function's argument for one of `items`."""
        return samples if self.group else samples[0]

    def outcomes(self, result: Any, samples: list[Sample], function: Any) -> Outcomes:
        """The outcomes for a result of `function`; a failure names where the function is defined."""
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            text = "the function returned an awaitable; define it with `async def`, so that it is awaited"
            return _placed(RewardFailed(reason=FailureReason.BAD_VALUE, text=text), function)
        lengths = [len(sample.response_ids) for sample in samples]
        if self.group:
            found = read_group(result, key=self.key, nums_tokens=lengths)
        else:
            found = [read(result, key=self.key, num_tokens=lengths[0])]
        if isinstance(found, RewardFailed):
            return _placed(found, function)
        return [_placed(one, function) if isinstance(one, RewardFailed) else one for one in found]


def raised(error: BaseException) -> RewardFailed:
    """The outcome when the function raised: the error and its place in one line, then the traceback."""
    return RewardFailed(reason=FailureReason.RAISED, text=told(error))


def bad_value(error: Exception, function: Any) -> RewardFailed:
    """The outcome when reading the function's result raised."""
    text = f"the function's result cannot be read: {in_one_line(error)}"
    return _placed(RewardFailed(reason=FailureReason.BAD_VALUE, text=text), function)


def _placed(failure: RewardFailed, function: Any) -> RewardFailed:
    at = place.of_function(function)
    known = at if at is not None and place.is_users(at.file) else None
    return RewardFailed(reason=failure.reason, text=f"{failure.text}{place.in_words(known)}")
