"""What a run's speed hangs on, and what moves it: one set of rules, for the live view and the report. Pure.

In: a stretch of a run in figures, which is the last steps for the live view and the whole run for the report.
Out: the bound, how much somebody should look, words. Invariant: the words name the number that they rest on,
and a remedy names a key or a part that can be changed.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import fmean

from fa_rollout.observe.snapshot import Snapshot, TimeSpent, TrainerPhase
from fa_rollout.observe.words import share

IDLE_LIMIT = 0.05
"""Share of the trainer's time that may go to waits for data before they are what bounds the run."""
IDLE_BAD = 0.2
UPDATE_LIMIT = 0.15
OUTSIDE_LIMIT = 0.25
FULL = 0.8
"""Share of the engines' slots from which on they count as busy."""
AT_BOUND = "the staleness bound"
NO_ROOM = "room in the ring"
"""Limits of admission by their names, `Snapshot.groups.limit`."""


class Level(StrEnum):
    """How much somebody should look."""

    OK = "ok"
    NOTE = "note"
    """Nothing is wrong, and it could be better; or the run begins, or ends."""
    WARN = "warn"
    BAD = "bad"


class Bound(StrEnum):
    """What a run's speed hangs on."""

    NOTHING = "nothing"
    """No step was trained."""
    TRAINING = "training"
    ENGINES = "engines"
    ENGINES_OUT = "engines_out"
    GENERATOR = "generator"
    """It is away."""
    RING = "ring"
    REWARDS = "rewards"
    FILTER = "filter"
    STALENESS = "staleness"
    IN_FLIGHT = "in_flight"
    """Engines have room, and why it is not used is not known."""
    UPDATES = "updates"
    OUTSIDE = "outside"
    """The trainer's own code between two calls of the hook."""


NO_WAITS = (Bound.UPDATES, Bound.OUTSIDE)
"""Those that take the trainer's time without a wait for data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holds:
    """What holds generation back, as shares of looks: 0 or 1 of a single one."""

    ring_full: float = 0.0
    """Finished groups have no room, or none may begin for that reason."""
    engines_out: float = 0.0
    scoring: float = 0.0
    """More samples are being scored than sampled."""
    limit: str = ""
    """What keeps further groups from starting, most often."""
    out: str = ""
    """Engines that are out, of the latest look with one."""
    load: float | None = None
    """Of the engines, mean over all looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A part of a run, or all of it."""

    spent: TimeSpent
    """The trainer's time."""
    staleness: int
    """The bound."""
    load: float | None = None
    """Share of the engines' slots in use; None: not told."""
    away: float = 0.0
    """Share of the trainer's waits in which no generator was there."""
    filtered: float = 0.0
    """Share of the groups that ended."""
    num_engines: int = 0
    holds: Holds = field(default_factory=Holds)


def holds_of(looks: Iterable[Snapshot]) -> Holds:
    """What these looks show, as shares of those at which the trainer waited for data, if it did at any."""
    waiting, every = _Tally(), _Tally()
    for now in looks:
        every.add(now)
        if now.trainer.phase is TrainerPhase.WAITING:
            waiting.add(now)
    return replace((waiting if waiting.num else every).holds(), load=every.load)


class _Tally:
    """Counts of looks."""

    def __init__(self) -> None:
        self.num = 0
        self._counts: Counter[str] = Counter()
        self._limits: Counter[str] = Counter()
        self._loads: list[float] = []
        self._out = ""

    def add(self, now: Snapshot) -> None:
        generator, groups = now.generator, now.groups
        lost = now.engines_out
        if lost:
            self._out = f"{len(lost)} of {len(now.engines)} engines, out: {lost[0].complaint}"
        sampled = max(generator.in_flight, now.run.samples_per_group)
        self.num += 1
        self._counts["ring_full"] += bool(generator.num_waiting_for_ring) or groups.limit == NO_ROOM
        self._counts["engines_out"] += bool(lost)
        self._counts["scoring"] += generator.rewards_in_progress > sampled
        self._limits[groups.limit] += 1
        if generator.load is not None:
            self._loads.append(generator.load)

    @property
    def load(self) -> float | None:
        return fmean(self._loads) if self._loads else None

    def holds(self) -> Holds:
        shares = {name: count / self.num for name, count in self._counts.items()}
        limit = self._limits.most_common(1)[0][0] if self._limits else ""
        return Holds(**shares, limit=limit, out=self._out)


def bound_of(stretch: Stretch) -> Bound:
    """The part of the trainer's time that is largest by its own measure, and for waits what they are for."""
    spent = stretch.spent
    if spent.total_s <= 0:
        return Bound.NOTHING
    sizes = {
        "waiting": spent.waiting / spent.total_s / IDLE_LIMIT,
        Bound.UPDATES: spent.updating / spent.total_s / UPDATE_LIMIT,
        Bound.OUTSIDE: spent.outside / spent.total_s / OUTSIDE_LIMIT,
    }
    largest = max(sizes, key=lambda kind: sizes[kind])
    if sizes[largest] <= 1:
        return Bound.TRAINING
    return _waited_for(stretch) if largest == "waiting" else Bound(largest)


def _waited_for(stretch: Stretch) -> Bound:
    holds = stretch.holds
    load = stretch.load
    found = {
        Bound.GENERATOR: stretch.away > 0.5,
        Bound.RING: holds.ring_full > 0.5,
        Bound.ENGINES_OUT: holds.engines_out > 0.5,
        Bound.REWARDS: holds.scoring > 0.5,
        Bound.FILTER: stretch.filtered > 0.5,
        Bound.ENGINES: load is None or load >= FULL,
        Bound.STALENESS: holds.limit == AT_BOUND,
    }
    return next((bound for bound, holds_back in found.items() if holds_back), Bound.IN_FLIGHT)


def level_of(bound: Bound, stretch: Stretch) -> Level:
    """How bad it is."""
    if bound is Bound.TRAINING:
        return Level.OK
    return Level.WARN if (stretch.spent.idle or 0.0) >= IDLE_BAD else Level.NOTE


def holder(bound: Bound, stretch: Stretch) -> str:
    """What the trainer is held up by, as a noun with its figure."""
    spent, holds = stretch.spent, stretch.holds
    busy = "" if stretch.load is None else f"{share(stretch.load)} busy"
    total_s = spent.total_s or 1.0
    return {
        Bound.ENGINES: f"the engines{busy and f' ({busy})'}",
        Bound.ENGINES_OUT: holds.out or "engines that are out",
        Bound.GENERATOR: f"a missing generator ({share(stretch.away)} of the waits)",
        Bound.RING: "a full ring",
        Bound.REWARDS: "rewards: more samples are scored than sampled",
        Bound.FILTER: f"the filter, which rejects {share(stretch.filtered)}",
        Bound.STALENESS: f"{AT_BOUND}, rollout.staleness = {stretch.staleness} (engines {busy})",
        Bound.IN_FLIGHT: f"too little in flight (engines {busy})",
        Bound.UPDATES: f"weight updates, {share(spent.updating / total_s)} of its time",
        Bound.OUTSIDE: f"its own code between steps, {share(spent.outside / total_s)} of its time",
    }.get(bound, "")


def remedies(bound: Bound, stretch: Stretch) -> list[str]:
    """What to change, the likeliest first."""
    if bound is Bound.TRAINING:
        return ["Faster steps need a faster trainer: more ranks, larger micro-batches.", *_spare(stretch)]
    return _REMEDIES[bound]


def _spare(stretch: Stretch) -> list[str]:
    if stretch.load is None or stretch.load >= FULL:
        return []
    fewer = "fewer engines would do, or " if stretch.num_engines > 1 else ""
    fresher = f"a lower rollout.staleness (now {stretch.staleness}) would train fresher samples at no cost"
    told = fewer + fresher if stretch.staleness else fewer.removesuffix(", or ")
    return [f"Only {share(stretch.load)} of the engines' slots are used{told and ': '}{told}."]


_REMEDIES = {
    Bound.NOTHING: ["Look at the warnings, and at the samples that failed."],
    Bound.ENGINES: [
        "Add engines (engine.urls), or raise engine.max_concurrent_samples if they have memory for it.",
        "Or ask for less: shorter answers (sampling.max_new_tokens), smaller groups.",
    ],
    Bound.ENGINES_OUT: ["See the engine's own log; it is probed, and used again when it answers."],
    Bound.GENERATOR: ["See how it ended, and what the warnings say; what it held starts again."],
    Bound.RING: [
        "Raise ring.bytes.",
        "See which rank holds the oldest lease: a view that outlives its block pins the ring.",
    ],
    Bound.REWARDS: ["Raise reward.num_workers, or make the reward async."],
    Bound.FILTER: ["Take prompts of middling difficulty: they make more of the same engines."],
    Bound.STALENESS: [
        "Raise rollout.staleness by one, or speed the engines up.",
        "If a few long answers hold steps back, a lower sampling.max_new_tokens cuts them.",
    ],
    Bound.IN_FLIGHT: [
        "Raise rollout.staleness or rollout.groups_per_step, so that more groups start ahead.",
        "Slow rewards (reward.num_workers) and few prompts keep engines empty too.",
    ],
    Bound.UPDATES: [
        "Publish less often: raise rollout.update_interval.",
        "Or make updates shorter: a faster trainer.weights_dir, or trainer.publish another way.",
    ],
    Bound.OUTSIDE: [
        "Save and evaluate less often, or evaluate beside training (hook.begin_evaluation waits for nothing)."
    ],
}
