"""Around a call of the user's function: its argument, the meaning of its answer and of its exceptions."""

import inspect
import traceback
from dataclasses import dataclass
from typing import Any

from fa_rollout.rewards.outcomes import FailureReason, Outcomes, RewardFailed, read, read_group
from fa_rollout.sample import Sample

_MAX_TRACEBACK = 8000


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

    def outcomes(self, result: Any, samples: list[Sample]) -> Outcomes:
        """What its answer means."""
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            text = "the function returned an awaitable; write it as `async def`, so that the loop awaits it"
            return RewardFailed(reason=FailureReason.BAD_VALUE, text=text)
        lengths = [len(sample.response_ids) for sample in samples]
        if self.group:
            return read_group(result, key=self.key, nums_tokens=lengths)
        return [read(result, key=self.key, num_tokens=lengths[0])]


def raised(error: BaseException) -> RewardFailed:
    """The outcome where the function raised; the text is the end of its traceback."""
    text = "".join(traceback.format_exception(error)).rstrip()
    return RewardFailed(reason=FailureReason.RAISED, text=text[-_MAX_TRACEBACK:])
