"""Dynamic filters: decide which scored groups to train on, and end the run if every group is rejected.

In: the scored samples of a group; after a fan-out, a member may be a list of samples. Out: a `Verdict`. A
filter that raises or does not return a bool fails the group (`UserCodeFailed`); that is not a rejection.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from fa_rollout.config import ConfigError
from fa_rollout.sample import Sample
from fa_rollout.user_code import place
from fa_rollout.user_code.dotted import ACCEPTED, resolve
from fa_rollout.user_code.failure import UserCodeFailed
from shm.errors import FaRolloutError

Member = Sample | Sequence[Sample]
ZERO_VARIANCE = "zero_variance"


class EndlessRejection(FaRolloutError, RuntimeError):
    """The filter rejected too many groups in a row: no batch would ever fill."""


class FilterOutcome(StrEnum):
    """Whether a filter kept a group."""

    KEPT = "kept"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A filter's decision on one group."""

    outcome: FilterOutcome
    reason: str = ""
    """Why the group was rejected. Equal causes have equal texts, so that they can be counted."""


class GroupFilter:
    """The filter named by `rollout.filter`."""

    def __init__(self, name: str, keep: Callable[[list[Any]], Any] | None) -> None:
        self.name = name
        self._keep = keep

    @property
    def function(self) -> Callable[[list[Any]], Any] | None:
        """The user's function; None for a built-in filter."""
        return self._keep

    @classmethod
    def load(cls, path: str) -> "GroupFilter":
        """Load `"zero_variance"`, or the dotted path of a `def keep(samples) -> bool`.

        Raises:
            ConfigError: the path cannot be imported, or does not name a callable.
        """
        if path == ZERO_VARIANCE:
            return cls(path, None)
        if "." not in path and ":" not in path:
            raise ConfigError(f"rollout.filter must be {ZERO_VARIANCE!r} or {ACCEPTED}, found {path!r}")
        keep = resolve(path, option="rollout.filter")
        if not callable(keep):
            raise ConfigError(f"rollout.filter must name a function, found {type(keep).__name__} at {path!r}")
        return cls(path, keep)

    def __call__(self, samples: Sequence[Member]) -> Verdict:
        """Decide on one group. Exceptions of the user's function pass through.

        Raises:
            UserCodeFailed: the function did not return a bool.
        """
        if self._keep is None:
            return zero_variance(samples)
        kept = self._keep(list(samples))
        if not isinstance(kept, bool | np.bool_):
            where = place.in_words(place.of_function(self._keep))
            raise UserCodeFailed(
                f"filter: bad_value: {self.name} must return a bool, found {type(kept).__name__}{where}"
            )
        if kept:
            return Verdict(outcome=FilterOutcome.KEPT)
        return Verdict(outcome=FilterOutcome.REJECTED, reason=f"{self.name} returned False")


def zero_variance(samples: Sequence[Member]) -> Verdict:
    """Keep a group whose rewards differ; equal rewards give zero advantage (DAPO, arXiv 2503.14476).

    Rewards are compared in float32, the trainer's precision. Samples without a reward, or with a loss mask of
    all 0, are ignored.
    """
    voters = [sample for sample in flat(samples) if not sample.is_excluded]
    rewards = {np.float32(sample.reward) for sample in voters if sample.reward is not None}
    if len(rewards) > 1:
        return Verdict(outcome=FilterOutcome.KEPT)
    reason = f"all rewards are {rewards.pop():g}" if rewards else "no sample has a reward"
    return Verdict(outcome=FilterOutcome.REJECTED, reason=reason)


def flat(samples: Sequence[Member]) -> Iterator[Sample]:
    """The samples of a group, including those of a fan-out."""
    for member in samples:
        if isinstance(member, Sample):
            yield member
        else:
            yield from member


class RejectionBound:
    """Counts consecutive rejections and ends the run at the limit, instead of generating forever."""

    def __init__(self, name: str, max_rejections: int, *, option: str = "rollout.max_rejections") -> None:
        """`option`: the configuration key that sets the limit, for the error text."""
        self.name = name
        self._option = option
        self.max_rejections = max_rejections
        self._reasons: Counter[str] = Counter()

    @property
    def num_in_a_row(self) -> int:
        return self._reasons.total()

    def record(self, verdict: Verdict) -> None:
        """Count a verdict; a kept group resets the count.

        Raises:
            EndlessRejection: `max_rejections` consecutive rejections.
        """
        if verdict.outcome is FilterOutcome.KEPT:
            self._reasons.clear()
        else:
            self._reasons[verdict.reason] += 1
            if self.num_in_a_row >= self.max_rejections:
                raise EndlessRejection(self._text())

    def _text(self) -> str:
        counts = "; ".join(f"{count} x {reason}" for reason, count in self._reasons.most_common(5))
        return (
            f"the filter {self.name!r} rejected {self.num_in_a_row} groups in a row ({counts}); "
            f"check rewards and data, or raise {self._option}"
        )


def default_bound(num_prompts: int) -> int:
    """Default limit of consecutive rejections: one epoch, but at least 64 and at most 1,000."""
    return min(max(num_prompts, 64), 1000)
