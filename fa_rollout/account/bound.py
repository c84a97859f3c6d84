"""What limits a run's speed, and what to change: one set of rules for the live view and the report. Pure.

In: figures of a stretch of a run: the last steps for the live view, the whole run for the report. Out: the
bound, its severity, words. Invariant: the words name the number that they rest on, and a remedy names
a key or a part that can be changed.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import fmean

from fa_rollout.account.figures import TimeSpent
from fa_rollout.account.snapshot import RING_SPACE, STALENESS_LIMIT, Snapshot, TrainerPhase
from fa_rollout.account.words import share

IDLE_LIMIT = 0.05
"""Share of the trainer's time spent waiting for data above which data limit the run."""
IDLE_BAD = 0.2
UPDATE_LIMIT = 0.15
OUTSIDE_LIMIT = 0.25
RANKS_LIMIT = 0.15
SATURATED = 0.8
"""Share of the engines' capacity above which they count as saturated."""


class Level(StrEnum):
    """Severity of a verdict."""

    OK = "ok"
    NOTE = "note"
    """Nothing is wrong, but it could be better; or the run is starting or ending."""
    WARN = "warn"
    BAD = "bad"


class Bound(StrEnum):
    """What limits a run's speed."""

    NOTHING = "nothing"
    """No step was trained."""
    TRAINING = "training"
    ENGINES = "engines"
    ENGINES_OUT = "engines_out"
    GENERATOR = "generator"
    """It is not running."""
    RING = "ring"
    REWARDS = "rewards"
    FILTER = "filter"
    STALENESS = "staleness"
    IN_FLIGHT = "in_flight"
    """Engines have capacity to spare, for an unknown reason."""
    UPDATES = "updates"
    OUTSIDE = "outside"
    """The trainer's own code between two calls of the hook."""
    RANKS = "ranks"
    """Ranks wait for the slowest one."""


NO_WAITS = (Bound.UPDATES, Bound.OUTSIDE, Bound.RANKS)
"""Bounds that take the trainer's time without a wait for data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holds:
    """What holds generation back, as shares of snapshots: 0 or 1 for a single one."""

    ring_full: float = 0.0
    """Finished groups wait for ring space, or no group may start for lack of it."""
    engines_out: float = 0.0
    scoring: float = 0.0
    """More samples are being scored than sampled."""
    limit: str = ""
    """The most frequent limit on new groups."""
    out: str = ""
    """Engines that are out, in the latest snapshot with one."""
    busy: float | None = None
    """Of the engines, mean over all snapshots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A part of a run, or all of it."""

    spent: TimeSpent
    """The trainer's time."""
    staleness: int
    """The limit, rollout.staleness."""
    busy: float | None = None
    """Share of the engines' capacity in use; None: unknown."""
    filtered: float = 0.0
    """Share of the groups that ended."""
    num_engines: int = 0
    holds: Holds = field(default_factory=Holds)


def holds_of(looks: Iterable[Snapshot]) -> Holds:
    """What these snapshots show, as shares of those in which the trainer waited for data, if any."""
    waiting, every = _Tally(), _Tally()
    for now in looks:
        every.add(now)
        if now.trainer.phase is TrainerPhase.WAITING:
            waiting.add(now)
    return replace((waiting if waiting.num else every).holds(), busy=every.busy)


class _Tally:
    """Counts of snapshots."""

    def __init__(self) -> None:
        self.num = 0
        self._counts: Counter[str] = Counter()
        self._limits: Counter[str] = Counter()
        self._busy: list[float] = []
        self._out = ""

    def add(self, now: Snapshot) -> None:
        generator, groups = now.generator, now.groups
        lost = now.engines_out
        if lost:
            self._out = f"{len(lost)} of {len(now.engines)} engines, out: {lost[0].complaint}"
        sampled = max(generator.in_flight, now.run.samples_per_group)
        self.num += 1
        self._counts["ring_full"] += bool(generator.num_waiting_for_ring) or groups.limit == RING_SPACE
        self._counts["engines_out"] += bool(lost)
        self._counts["scoring"] += generator.rewards_in_progress > sampled
        self._limits[groups.limit] += 1
        if generator.busy is not None:
            self._busy.append(generator.busy)

    @property
    def busy(self) -> float | None:
        return fmean(self._busy) if self._busy else None

    def holds(self) -> Holds:
        shares = {name: count / self.num for name, count in self._counts.items()}
        limit = self._limits.most_common(1)[0][0] if self._limits else ""
        return Holds(**shares, limit=limit, out=self._out)


def bound_of(stretch: Stretch) -> Bound:
    """What takes the largest part of the trainer's time relative to its limit."""
    spent = stretch.spent
    if spent.total_s <= 0:
        return Bound.NOTHING
    sizes = {
        "waiting": spent.waiting / spent.total_s / IDLE_LIMIT,
        Bound.UPDATES: spent.updating / spent.total_s / UPDATE_LIMIT,
        Bound.OUTSIDE: spent.outside / spent.total_s / OUTSIDE_LIMIT,
        Bound.RANKS: spent.waiting_for_ranks / spent.total_s / RANKS_LIMIT,
    }
    largest = max(sizes, key=lambda kind: sizes[kind])
    if sizes[largest] <= 1:
        return Bound.TRAINING
    return _waited_for(stretch) if largest == "waiting" else Bound(largest)


def _waited_for(stretch: Stretch) -> Bound:
    holds, busy = stretch.holds, stretch.busy
    found = {
        Bound.GENERATOR: stretch.spent.away > 0.5,
        Bound.RING: holds.ring_full > 0.5,
        Bound.ENGINES_OUT: holds.engines_out > 0.5,
        Bound.REWARDS: holds.scoring > 0.5,
        Bound.FILTER: stretch.filtered > 0.5,
        Bound.ENGINES: busy is None or busy >= SATURATED,
        Bound.STALENESS: holds.limit == STALENESS_LIMIT,
    }
    return next((bound for bound, holds_back in found.items() if holds_back), Bound.IN_FLIGHT)


def level_of(bound: Bound, stretch: Stretch) -> Level:
    """The severity."""
    if bound is Bound.TRAINING:
        return Level.OK
    return Level.WARN if (stretch.spent.idle or 0.0) >= IDLE_BAD else Level.NOTE


def cause(bound: Bound, stretch: Stretch) -> str:
    """Why the trainer loses time, with its figure; empty if it loses none."""
    spent, holds = stretch.spent, stretch.holds
    busy = "" if stretch.busy is None else f"engines {share(stretch.busy)} busy"
    updating, outside, for_ranks = (
        share(part / (spent.total_s or 1.0))
        for part in (spent.updating, spent.outside, spent.waiting_for_ranks)
    )
    return {
        Bound.ENGINES: f"the engines are saturated{busy and f' ({busy})'}",
        Bound.ENGINES_OUT: holds.out or "engines are out",
        Bound.GENERATOR: f"no generator was running in {share(spent.away)} of the waits",
        Bound.RING: "the ring is full",
        Bound.REWARDS: "rewards are slower than generation",
        Bound.FILTER: f"the filter rejects {share(stretch.filtered)} of the groups",
        Bound.STALENESS: f"the staleness limit is reached, rollout.staleness = {stretch.staleness} ({busy})",
        Bound.IN_FLIGHT: f"too few requests are in flight ({busy})",
        Bound.UPDATES: f"weight updates take {updating} of the trainer's time",
        Bound.OUTSIDE: f"the trainer's own code between steps takes {outside} of its time",
        Bound.RANKS: f"ranks wait for the slowest rank {for_ranks} of the time",
    }.get(bound, "")


def headline(bound: Bound, stretch: Stretch) -> str:
    """The bound in one sentence, the same for the live view and the report."""
    idle = f"trainer idle {share(stretch.spent.idle)}"
    if bound is Bound.NOTHING:
        return "no step was trained"
    if bound is Bound.TRAINING:
        busy = "" if stretch.busy is None else f", engines {share(stretch.busy)} busy"
        return f"healthy: {idle}{busy}"
    return f"{cause(bound, stretch)}; {idle}" if bound in NO_WAITS else f"{idle}: {cause(bound, stretch)}"


def remedies(bound: Bound, stretch: Stretch) -> list[str]:
    """What to change, the likeliest first."""
    if bound is Bound.TRAINING:
        return ["For faster steps, speed the trainer up: more ranks, larger micro-batches.", *_spare(stretch)]
    return _REMEDIES[bound]


def _spare(stretch: Stretch) -> list[str]:
    if stretch.busy is None or stretch.busy >= SATURATED:
        return []
    fewer = "fewer engines would do, or " if stretch.num_engines > 1 else ""
    fresher = f"a lower rollout.staleness (now {stretch.staleness}) would train fresher samples at no cost"
    options = fewer + fresher if stretch.staleness else fewer.removesuffix(", or ")
    return [f"The engines are only {share(stretch.busy)} busy{options and ': '}{options}."]


_REMEDIES = {
    Bound.NOTHING: ["See the warnings and the groups that failed."],
    Bound.ENGINES: [
        "Add engines (engine.urls), or raise engine.max_concurrent_samples if all slots are in use.",
        "Or reduce the work: shorter answers (sampling.max_new_tokens), smaller groups.",
    ],
    Bound.ENGINES_OUT: ["See the engine's log; it is probed, and used again once it answers."],
    Bound.GENERATOR: ["See the warnings for how it ended; the groups it was working on start again."],
    Bound.RING: [
        "Raise ring.bytes.",
        "See which rank holds the oldest lease: a view kept after its block keeps the ring full.",
    ],
    Bound.REWARDS: ["Raise reward.num_workers, or make the reward async."],
    Bound.FILTER: ["Use prompts of medium difficulty: more of the generated groups are then trained."],
    Bound.STALENESS: [
        "Raise rollout.staleness by one, or speed the engines up.",
        "If a few long answers delay steps, lower sampling.max_new_tokens.",
    ],
    Bound.IN_FLIGHT: [
        "Raise rollout.staleness or rollout.groups_per_step, so that more groups start early.",
        "Slow rewards (reward.num_workers) and too few prompts also leave engines idle.",
    ],
    Bound.UPDATES: [
        "Publish less often: raise rollout.update_interval.",
        "Or shorten updates: a faster trainer.weights_dir, or another trainer.publish.",
    ],
    Bound.OUTSIDE: [
        "Save and evaluate less often, or evaluate during training (hook.begin_evaluation does not wait)."
    ],
    Bound.RANKS: [
        "Find out why one rank is slower: its GPU, its host, or code that only rank 0 runs.",
        "Uneven parts of a step: raise trainer.max_tokens_per_micro_batch or rollout.groups_per_step.",
    ],
}
