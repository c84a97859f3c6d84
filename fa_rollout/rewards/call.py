"""Around a call of the user's function: its argument, the meaning of its answer and of its exceptions."""

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
    """It takes a list of samples and returns a list; else one sample, one reward."""
    key: str | None
    """It returns dicts, and this entry is the reward."""

    def items(self, samples: list[Sample]) -> list[list[Sample]]:
        """The samples of each call that scores a group."""
        return [samples] if self.group else [[sample] for sample in samples]

    def argument(self, samples: list[Sample]) -> Any:
        """What the function is called with, for one of `items`."""
        return samples if self.group else samples[0]

    def outcomes(self, result: Any, samples: list[Sample], function: Any) -> Outcomes:
        """What the answer of `function` means; one that means nothing names the function's place."""
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            text = "the function returned an awaitable; write it as `async def`, so that the loop awaits it"
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
    """The outcome where the function raised: the error and its place in one line, then the traceback."""
    return RewardFailed(reason=FailureReason.RAISED, text=told(error))


def bad_value(error: Exception, function: Any) -> RewardFailed:
    """The outcome where what the function returned raises when it is looked at."""
    text = f"what the function returned cannot be read: {in_one_line(error)}"
    return _placed(RewardFailed(reason=FailureReason.BAD_VALUE, text=text), function)


def _placed(failure: RewardFailed, function: Any) -> RewardFailed:
    at = place.of_function(function)
    known = at if at is not None and place.is_users(at.file) else None
    return RewardFailed(reason=failure.reason, text=f"{failure.text}{place.in_words(known)}")
