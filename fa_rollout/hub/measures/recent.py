"""What lately happened in a run, for people: steps, updates, warnings, why groups were lost.

In: news, as they come. Out: the parts of a snapshot. Invariant: bounded, whatever a run does for days; it
decides nothing.
"""

import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

from fa_rollout.account.figures import StepFigures, TimeSpent, UpdateFigures
from fa_rollout.account.reasons import kind_of
from fa_rollout.account.snapshot import Reason, WarningText
from fa_rollout.hub.flow.composition import staleness
from fa_rollout.hub.flow.flow import Step

NUM_STEPS = 256
NUM_UPDATES = 64
NUM_WARNINGS = 16
NUM_REASONS = 32
_TEXT_LENGTH = 400


@dataclass(slots=True)
class _Told:
    text: str
    count: int
    at_s: float


class History:
    """One run's."""

    def __init__(self) -> None:
        self.steps: deque[StepFigures] = deque(maxlen=NUM_STEPS)
        self.updates: deque[UpdateFigures] = deque(maxlen=NUM_UPDATES)
        self.num_steps = self.num_samples = self.num_updates = self.num_warnings = 0
        self.bubble_s = 0.0
        self.staleness_max: int | None = None
        self._warnings: OrderedDict[str, _Told] = OrderedDict()
        self._reasons: OrderedDict[tuple[str, str], _Told] = OrderedDict()

    def trained(
        self, step: Step, spent: TimeSpent, *, is_first: bool, busy: float | None = None
    ) -> StepFigures:
        """All ranks have trained a step."""
        self.num_steps += 1
        self.num_samples += step.num_samples
        ages = [staleness(step.version, commit.oldest_version) for commit in step.commits]
        known = [age for age in ages if age is not None]
        oldest = None if len(known) < len(ages) else max(known, default=None)
        if oldest is not None:
            self.staleness_max = max(oldest, self.staleness_max or 0)
        figures = StepFigures(
            step=step.step,
            version=step.version,
            time_s=time.time(),
            num_groups=len(step.groups),
            num_samples=step.num_samples,
            num_tokens=step.num_tokens,
            response_tokens=sum(sum(commit.response_lens) for commit in step.commits),
            reward_mean=step.reward_mean,
            staleness_max=oldest,
            staleness_mean=sum(known) / len(known) if known else None,
            spent=spent,
            is_first=is_first,
            busy=busy,
        )
        self.steps.append(figures)
        return figures

    def published(self, version: int, *, write_s: float, load_s: float, bubble_s: float) -> UpdateFigures:
        """A version is in the engines."""
        self.num_updates += 1
        self.bubble_s += bubble_s
        figures = UpdateFigures(
            version=version, time_s=time.time(), write_s=write_s, load_s=load_s, bubble_s=bubble_s
        )
        self.updates.append(figures)
        return figures

    def warned(self, text: str) -> None:
        """Something degraded; the same words again count as one warning."""
        self.num_warnings += 1
        _tell(self._warnings, text, text, NUM_WARNINGS)

    def lost(self, outcome: str, reason: str) -> bool:
        """A group ended without being trained; True where it is the first one of its kind.

        Of a reason the first line is kept: a traceback may follow it.
        """
        key = (outcome, kind_of(reason))
        is_first = key not in self._reasons
        _tell(self._reasons, key, reason.partition("\n")[0], NUM_REASONS)
        return is_first

    def warnings(self) -> list[WarningText]:
        """The latest last."""
        now_s = time.monotonic()
        return [
            WarningText(text=told.text, age_s=now_s - told.at_s, count=told.count)
            for told in self._warnings.values()
        ]

    def reasons(self) -> list[Reason]:
        """The most frequent first."""
        now_s = time.monotonic()
        reasons = [
            Reason(outcome=outcome, reason=kind, count=told.count, last=told.text, age_s=now_s - told.at_s)
            for (outcome, kind), told in self._reasons.items()
        ]
        return sorted(reasons, key=lambda reason: -reason.count)


def _tell(told: "OrderedDict[Any, _Told]", key: Any, text: str, limit: int) -> None:
    """Count, and forget what was not told for longest."""
    known = told.pop(key, None)
    told[key] = _Told(text[:_TEXT_LENGTH], 1 + (known.count if known else 0), time.monotonic())
    while len(told) > limit:
        told.popitem(last=False)
