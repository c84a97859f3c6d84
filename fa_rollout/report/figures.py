"""What the report draws: the hub's figures of each step, and levels over time. Pure.

In: a `History`. Invariant: figures are read, not computed again; of the levels, the samples under way are an
estimate.
"""

from collections import Counter
from dataclasses import dataclass
from functools import reduce

from fa_rollout.account.figures import StepFigures, TimeSpent
from fa_rollout.records.history import History
from fa_rollout.records.story import Group


def steps_of(history: History) -> list[StepFigures]:
    """The steps that were trained, in order, as the hub measured them."""
    return [step.figures for _, step in sorted(history.steps.items()) if step.figures is not None]


def spent(history: History, steps: list[StepFigures]) -> TimeSpent:
    """The trainer's time since its first batch: the hub's own at the end, the trained steps' before that."""
    if history.spent is not None:
        return history.spent
    return reduce(TimeSpent.plus, (step.spent for step in steps), TimeSpent())


# --- over time -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Means over equal stretches of the run."""

    start_s: float
    width_s: float
    """Of a stretch."""
    running: list[float]
    """Samples that engines work on: shorter ones of a group are taken to have ended earlier."""
    ready: list[float]
    """Groups that wait for the trainer."""
    ring_bytes: list[float]
    """Of records that are not given back."""
    tokens_per_s: list[float]
    """Response tokens of groups that became records."""


def series(history: History, num_stretches: int = 240) -> Series:
    """From the launch to its last event."""
    start_s = history.began_s
    width_s = max(1e-6, (history.last_s - start_s) / num_stretches)
    running, ready, ring = _Level(num_stretches), _Level(num_stretches), _Level(num_stretches)
    tokens = [0.0] * num_stretches
    per_group = int((history.config.get("rollout") or {}).get("samples_per_group", 1))

    def place(time_s: float) -> float:
        return (time_s - start_s) / width_s

    for group in history.groups.values():
        left_s = group.committed_s or group.ended_s or history.last_s
        if group.dispatched_s is not None and left_s > group.dispatched_s:
            lens = group.response_lens
            places = sum(lens) / max(lens) if any(lens) else per_group
            running.add(place(group.dispatched_s), place(left_s), places)
        if group.committed_s is None:
            continue
        step = history.steps.get(-1 if group.step is None else group.step)
        taken_s = group.ended_s or history.last_s if step is None else step.composed_s
        freed_s = group.ended_s or history.last_s
        ready.add(place(group.committed_s), place(taken_s), 1)
        ring.add(place(group.committed_s), place(freed_s), group.num_bytes)
        tokens[min(num_stretches - 1, int(place(group.committed_s)))] += sum(group.response_lens)
    return Series(
        start_s=start_s,
        width_s=width_s,
        running=running.means,
        ready=ready.means,
        ring_bytes=ring.means,
        tokens_per_s=[number / width_s for number in tokens],
    )


class _Level:
    """A level that intervals add to, as its mean in each stretch."""

    def __init__(self, num_stretches: int) -> None:
        self.means = [0.0] * num_stretches

    def add(self, start: float, end: float, amount: float) -> None:
        first = max(0, int(start))
        for index in range(first, min(len(self.means) - 1, int(end)) + 1):
            self.means[index] += amount * max(0.0, min(end, index + 1) - max(start, index))


# --- sums ------------------------------------------------------------------------------------------------


def capacity(history: History) -> int:
    """Samples that engines take at once; 0 where it was not told."""
    return max((life.concurrency for life in history.lives), default=0)


def reasons(history: History) -> list[tuple[str, str, int, str]]:
    """(how, kind, number, an example) of groups that ended untrained, the most frequent first."""
    counts: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    for group in history.groups.values():
        if group.place in ("failed", "filtered", "dropped"):
            name = (group.place, group.kind)
            counts[name] += 1
            examples[name] = group.reason
    return [(how, kind, number, examples[how, kind]) for (how, kind), number in counts.most_common()]


def trained_groups(history: History) -> list[Group]:
    """Groups that steps took."""
    return [group for group in history.groups.values() if group.version is not None]
