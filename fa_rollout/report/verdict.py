"""What bounded a run, and what to change, in words. Pure.

In: a few numbers. Out: a headline and advice. Invariant: each sentence names the number that it rests on, and
each advice a key or a part that can be changed.
"""

from dataclasses import dataclass, field
from enum import StrEnum

IDLE_LIMIT = 0.1
"""Share of the trainer's time that may go to waits before they are what bounds the run."""
UPDATE_LIMIT = 0.15
OTHER_LIMIT = 0.25
FULL = 0.7
"""Share of the engines' places from which they count as busy."""


class Bound(StrEnum):
    """What a run's speed hung on."""

    NOTHING = "no step was trained"
    ENGINES = "the engines"
    GENERATOR = "a generator that was away"
    ADMISSION = "how much may be in flight"
    UPDATES = "weight updates"
    OWN_CODE = "the trainer's own code between steps"
    TRAINING = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a verdict rests on."""

    shares: dict[str, float]
    """Of the trainer's time, by kind; empty without steps."""
    load: float | None
    """Share of engines' places taken, over the run; None: not told."""
    load_in_waits: float | None
    away_share: float
    """Of the trainer's waits, in which no generator was there."""
    staleness: int
    """The bound."""
    staleness_max: int | None
    """That was seen."""
    bubble_share: float
    """Of wall time, that engines stood still for updates."""
    num_ended: int
    """Groups that ended."""
    num_filtered: int
    num_failed: int
    worst_reason: str = ""
    num_generator_deaths: int = 0
    mistake: str = ""
    """Why it ended early; empty where it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer before the question."""

    bound: Bound
    headline: str
    advice: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def judge(facts: Facts) -> Verdict:
    """Name the bound, and what moves it."""
    bound = _bound(facts)
    headline, advice = _SAY[bound](facts)
    if facts.mistake:
        headline = f"The run ended early: {facts.mistake}. Until then: {headline[:1].lower()}{headline[1:]}"
    return Verdict(bound=bound, headline=headline, advice=advice, notes=_notes(facts))


def _bound(facts: Facts) -> Bound:
    if not facts.shares:
        return Bound.NOTHING
    sizes = {
        "wait": facts.shares["wait"] / IDLE_LIMIT,
        "update": facts.shares["update"] / UPDATE_LIMIT,
        "other": facts.shares["other"] / OTHER_LIMIT,
    }
    largest = max(sizes, key=lambda kind: sizes[kind])
    if sizes[largest] < 1:
        return Bound.TRAINING
    if largest == "wait":
        if facts.away_share > 0.5:
            return Bound.GENERATOR
        is_full = facts.load_in_waits is None or facts.load_in_waits >= FULL
        return Bound.ENGINES if is_full else Bound.ADMISSION
    return Bound.UPDATES if largest == "update" else Bound.OWN_CODE


def _nothing(facts: Facts) -> tuple[str, list[str]]:
    return "No step was trained.", ["Look at the warnings and at the samples that failed, below."]


def _engines(facts: Facts) -> tuple[str, list[str]]:
    full = (
        ""
        if facts.load_in_waits is None
        else f", and in these waits they were {facts.load_in_waits:.0%} full"
    )
    return (
        f"The engines bounded this run: the trainer waited {facts.shares['wait']:.0%} of its time for "
        f"them{full}.",
        [
            "Add engines (engine.urls), or give each more at once (engine.max_concurrent_samples) if it "
            "keeps up.",
            "Or ask for less: shorter answers (sampling.max_new_tokens), smaller groups "
            "(rollout.samples_per_group).",
        ],
    )


def _generator(facts: Facts) -> tuple[str, list[str]]:
    return (
        f"The generator was away: the trainer waited {facts.shares['wait']:.0%} of its time, and in "
        f"{facts.away_share:.0%} of that no generator was there.",
        ["See below how its lives ended, and what the warnings say; a run of hours forgives one such end."],
    )


def _admission(facts: Facts) -> tuple[str, list[str]]:
    load = facts.load_in_waits or 0.0
    return (
        f"Too little was in flight: the trainer waited {facts.shares['wait']:.0%} of its time, while only "
        f"{load:.0%} of the engines' places were taken.",
        [
            f"Let more groups start ahead: raise rollout.staleness (now {facts.staleness}), or rollout."
            "groups_per_step.",
            "If a few long answers hold steps back, a higher staleness hides them, and a lower "
            "sampling.max_new_tokens cuts them; slow rewards count too (reward.num_workers).",
        ],
    )


def _updates(facts: Facts) -> tuple[str, list[str]]:
    return (
        f"Weight updates bounded this run: they took {facts.shares['update']:.0%} of the trainer's time.",
        [
            "Publish less often: raise rollout.update_interval.",
            "Or make them shorter: weight files on a faster file system (TMPDIR), or push by hand over the "
            "engines' own channels.",
        ],
    )


def _own_code(facts: Facts) -> tuple[str, list[str]]:
    return (
        f"The trainer's own code between steps bounded this run: {facts.shares['other']:.0%} of its time "
        "went to neither batches nor updates.",
        ["Save and evaluate less often, or beside training (hook.begin_evaluation waits for nothing)."],
    )


def _training(facts: Facts) -> tuple[str, list[str]]:
    advice = ["Faster steps need a faster trainer: more ranks, larger micro-batches, less recomputation."]
    if facts.load is not None and facts.load < FULL:
        advice.append(
            f"Only {facts.load:.0%} of the engines' places were taken: fewer engines would do, or a lower "
            f"rollout.staleness (now {facts.staleness}) would train fresher samples at no cost."
        )
    return (
        f"Training bounded this run, as it should: the trainer was at work {facts.shares['train']:.0%} of "
        f"its time and waited for samples {facts.shares['wait']:.0%} of it.",
        advice,
    )


_SAY = {
    Bound.NOTHING: _nothing,
    Bound.ENGINES: _engines,
    Bound.GENERATOR: _generator,
    Bound.ADMISSION: _admission,
    Bound.UPDATES: _updates,
    Bound.OWN_CODE: _own_code,
    Bound.TRAINING: _training,
}


def _notes(facts: Facts) -> list[str]:
    notes = []
    if facts.staleness_max is not None:
        notes.append(
            f"The stalest sample was {facts.staleness_max} versions old; {facts.staleness} are allowed."
        )
    if facts.bubble_share >= 0.05:
        notes.append(f"Engines stood still {facts.bubble_share:.0%} of the time to load weights.")
    if facts.num_ended and facts.num_filtered / facts.num_ended >= 0.2:
        share = facts.num_filtered / facts.num_ended
        notes.append(f"{share:.0%} of the groups were filtered: their prompts are too easy, or too hard.")
    if facts.num_failed:
        notes.append(f"{facts.num_failed} groups failed, most by “{facts.worst_reason}”.")
    if facts.num_generator_deaths:
        times = "once" if facts.num_generator_deaths == 1 else f"{facts.num_generator_deaths} times"
        notes.append(f"The generator was replaced {times}; what it held was started again.")
    return notes
