"""Dynamic filters: which scored groups are worth training on, and when to stop looking for them.

In: the samples of a group, scored; after a fan-out a member may be a list of samples. Out: a `Verdict`. A
filter that raises, or returns no bool, is not one that rejects: it is a `UserCodeFailed`.
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
    """A filter has rejected so many groups in a row that no batch will ever fill."""


class FilterOutcome(StrEnum):
    """What a filter made of a group."""

    KEPT = "kept"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A filter's answer for one group."""

    outcome: FilterOutcome
    reason: str = ""
    """Why the group was not kept; equal for equal causes, so that reasons can be counted."""


class GroupFilter:
    """The filter that `rollout.filter` names."""

    def __init__(self, name: str, keep: Callable[[list[Any]], Any] | None) -> None:
        self.name = name
        self._keep = keep

    @property
    def function(self) -> Callable[[list[Any]], Any] | None:
        """The user's; None for a filter of ours."""
        return self._keep

    @classmethod
    def load(cls, path: str) -> "GroupFilter":
        """`"zero_variance"`, or the dotted path of `def keep(samples) -> bool`.

        Raises:
            ConfigError: the path cannot be imported, or is no plain callable.
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
        """Judge one group; raises whatever the user's function raises.

        Raises:
            UserCodeFailed: it returned something that is no bool.
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
    """Keep a group whose rewards differ: equal ones give zero advantage (DAPO, arXiv 2503.14476).

    Rewards are compared in float32, as the trainer sees them; samples without one do not count, nor do those
    whose loss mask is all 0.
    """
    voters = [sample for sample in flat(samples) if not sample.is_excluded]
    rewards = {np.float32(sample.reward) for sample in voters if sample.reward is not None}
    if len(rewards) > 1:
        return Verdict(outcome=FilterOutcome.KEPT)
    reason = f"all rewards are {rewards.pop():g}" if rewards else "no sample has a reward"
    return Verdict(outcome=FilterOutcome.REJECTED, reason=reason)


def flat(samples: Sequence[Member]) -> Iterator[Sample]:
    """The samples of a group, those of a fan-out included."""
    for member in samples:
        if isinstance(member, Sample):
            yield member
        else:
            yield from member


class RejectionBound:
    """Counts rejections in a row; too many of them end the run instead of generating for ever."""

    def __init__(self, name: str, max_rejections: int, *, option: str = "rollout.max_rejections") -> None:
        """`option`: what a user sets the bound by."""
        self.name = name
        self._option = option
        self.max_rejections = max_rejections
        self._reasons: Counter[str] = Counter()

    @property
    def num_in_a_row(self) -> int:
        return self._reasons.total()

    def record(self, verdict: Verdict) -> None:
        """Count a verdict; a kept group starts the count anew.

        Raises:
            EndlessRejection: `max_rejections` in a row.
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
            f"the filter {self.name!r} must keep a group now and then; it rejected {self.num_in_a_row} "
            f"groups in a row ({counts}); check rewards and data, or raise {self._option}"
        )


def default_bound(num_prompts: int) -> int:
    """Rejections in a row that stop a run by default: one epoch, 64 at least, 1,000 at most."""
    return min(max(num_prompts, 64), 1000)
