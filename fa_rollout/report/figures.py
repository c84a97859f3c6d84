"""Numbers of a run, computed from its history. Pure.

In: a `History`. Out: figures of each step, the trainer's time, series over time, histograms.
Invariant: what the events do not tell is None or absent; the samples at engines alone are an estimate.

A cycle of the trainer is from the first rank's request for a step to its request for the next one.
"""

from collections import Counter
from dataclasses import dataclass
from statistics import fmean

from fa_rollout.observe.snapshot import TimeSpent
from fa_rollout.records.history import History
from fa_rollout.records.story import Group, Step

KINDS = ("train", "wait", "update", "other")
"""What the trainer's time goes to, in the order of the pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One step that was handed out."""

    step: int
    start_s: float
    train: float
    """Seconds in the block of the batch, mean over ranks; so are the next three."""
    wait: float
    update: float
    other: float
    """Between two calls of the hook: saving, evaluating, whatever the trainer does by itself."""
    is_first: bool
    """Of the trainer's life: its wait is start-up."""
    reward: float | None
    staleness_max: int | None
    staleness_mean: float | None
    num_groups: int
    num_samples: int
    num_tokens: int
    """Of responses."""

    @property
    def idle(self) -> float:
        """Wait that is no start-up."""
        return 0.0 if self.is_first else self.wait

    @property
    def total(self) -> float:
        return self.train + self.idle + self.update + self.other


def step_figures(history: History) -> list[StepFigures]:
    """Of all steps that a rank got, in order; what was lost ends a cycle, and is none."""
    every = [step for step in [*history.steps.values(), *history.lost] if step.ranks]
    every.sort(key=lambda step: step.asked_s)
    found = []
    for index, step in enumerate(every):
        if history.steps[step.step] is not step:
            continue
        following_s = every[index + 1].asked_s if index + 1 < len(every) else None
        is_first = index == 0 or history.has_left(every[index - 1].asked_s, step.asked_s)
        found.append(_figures(history, step, following_s, is_first=is_first))
    return sorted(found, key=lambda figures: figures.step)


def _figures(history: History, step: Step, following_s: float | None, *, is_first: bool) -> StepFigures:
    groups = [history.groups[name] for name in step.groups if name in history.groups]
    parts = list(step.ranks.values())
    start_s = step.asked_s
    over_s = min([history.last_s, *(time_s for time_s in history.left_s if time_s > start_s)])
    updates = [u for u in history.updates if start_s <= u.entering_s < min(following_s or over_s, over_s)]
    end_s = max([*(p.finished_s or over_s for p in parts), *(u.ended_s or over_s for u in updates)])
    if following_s is not None and following_s <= over_s:
        end_s = following_s  # else the next step is of another life of the trainer
    wait = fmean(p.handed_s - p.asked_s for p in parts)
    train = fmean((p.finished_s or over_s) - p.handed_s for p in parts)
    update = sum((u.ended_s or over_s) - u.entering_s for u in updates)
    rewards = [reward for group in groups for reward in group.rewards if reward is not None]
    ages = [group.staleness for group in groups if group.staleness is not None]
    return StepFigures(
        step=step.step,
        start_s=start_s,
        train=train,
        wait=wait,
        update=update,
        other=max(0.0, end_s - start_s - wait - train - update),
        is_first=is_first,
        reward=fmean(rewards) if rewards else None,
        staleness_max=max(ages, default=None),
        staleness_mean=fmean(ages) if ages else None,
        num_groups=len(groups),
        num_samples=sum(len(group.rewards) for group in groups),
        num_tokens=sum(sum(group.response_lens) for group in groups),
    )


def spent(steps: list[StepFigures]) -> TimeSpent:
    """The trainer's time since its first batch."""
    return TimeSpent(
        training=sum(s.train for s in steps),
        waiting=sum(s.idle for s in steps),
        updating=sum(s.update for s in steps),
        outside=sum(s.other for s in steps),
    )


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


def load(history: History, steps: list[StepFigures], over: Series) -> float | None:
    """Share of the engines' places that were taken since the first batch, where the metrics do not tell it.

    An estimate: of a group it is known when its first request left and when its record came, and a shorter
    answer is taken to have held its place for a shorter time.
    """
    room = capacity(history)
    if not steps or not room:
        return None
    start_s, end_s = steps[0].start_s + steps[0].wait, steps[-1].start_s + steps[-1].total
    taken = total = 0.0
    for index, level in enumerate(over.running):
        low = over.start_s + index * over.width_s
        share = max(0.0, min(end_s, low + over.width_s) - max(start_s, low))
        taken += min(level, room) * share
        total += share
    return min(1.0, taken / (total * room)) if total > 0 else None


def away_share(history: History, steps: list[StepFigures]) -> float:
    """Share of the trainer's waits in which no generator was there to end them."""
    waits = [(step.start_s, step.start_s + step.idle) for step in steps if step.idle > 0]
    there = [
        (life.ready_s, history.last_s if life.ended_s is None else life.ended_s)
        for life in history.lives
        if life.ready_s is not None
    ]
    waited_s = sum(b - a for a, b in waits)
    with_one_s = sum(max(0.0, min(b, d) - max(a, c)) for a, b in waits for c, d in there)
    return 1 - with_one_s / waited_s if waited_s > 0 and history.lives else 0.0


def reason_class(reason: str) -> str:
    """What groups that ended untrained are counted by: the reason without its particulars."""
    parts = [part.strip() for part in reason.split(":")]
    if parts[0] in ("generate", "reward", "filter", "slime", "raised") and len(parts) > 1:
        return f"{parts[0]}: {parts[1]}"[:80]
    return parts[0][:80] or "not told"


def reasons(history: History) -> list[tuple[str, str, int, str]]:
    """(how, class, number, an example) of groups that ended untrained, the most frequent first."""
    counts: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    for group in history.groups.values():
        if group.place in ("failed", "filtered", "dropped"):
            name = (group.place, reason_class(group.reason))
            counts[name] += 1
            examples[name] = group.reason
    return [(how, kind, number, examples[how, kind]) for (how, kind), number in counts.most_common()]


def trained_groups(history: History) -> list[Group]:
    """Groups that steps took."""
    return [group for group in history.groups.values() if group.version is not None]
