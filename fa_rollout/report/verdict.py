"""What bounded a run, and what to change, in words. Pure.

In: the run as one stretch, judged by the rules of `observe.bound`, and a few numbers. Out: a headline, advice
and notes. Invariant: each sentence names the number that it rests on.
"""

from dataclasses import dataclass, field

from fa_rollout.observe.bound import NO_WAITS, Bound, Level, Stretch, bound_of, holder, level_of, remedies
from fa_rollout.observe.words import share


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a verdict rests on."""

    stretch: Stretch
    """The whole run, since its first batch."""
    staleness_max: int | None = None
    """That was seen."""
    bubble_share: float = 0.0
    """Of wall time, that engines stood still for updates."""
    num_ended: int = 0
    """Groups that ended."""
    num_filtered: int = 0
    num_failed: int = 0
    worst_reason: str = ""
    num_generator_deaths: int = 0
    mistake: str = ""
    """Why it ended early; empty where it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer before the question."""

    bound: Bound
    level: Level
    headline: str
    advice: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def judge(facts: Facts) -> Verdict:
    """Name the bound, and what moves it."""
    stretch = facts.stretch
    bound = bound_of(stretch)
    level, headline = level_of(bound, stretch), _headline(bound, stretch)
    if facts.mistake:
        level = Level.BAD
        headline = f"The run ended early: {facts.mistake}. Until then: {headline[:1].lower()}{headline[1:]}"
    return Verdict(
        bound=bound, level=level, headline=headline, advice=remedies(bound, stretch), notes=_notes(facts)
    )


def _headline(bound: Bound, stretch: Stretch) -> str:
    spent = stretch.spent
    if bound is Bound.NOTHING:
        return "No step was trained."
    if bound is Bound.TRAINING:
        worked = f"The trainer was at work {share(spent.training / spent.total_s)} of its time"
        return f"Healthy: training bounded this run. {worked} and waited for data {share(spent.idle)} of it."
    held, waited = f"held up by {holder(bound, stretch)}", f"waited for data {share(spent.idle)} of its time"
    if bound in NO_WAITS:
        return f"The trainer was {held}; it {waited}."
    return f"The trainer {waited}; it was {held}."


def _notes(facts: Facts) -> list[str]:
    notes = []
    if facts.staleness_max is not None:
        versions = "version" if facts.staleness_max == 1 else "versions"
        oldest = f"The stalest sample was {facts.staleness_max} {versions} old"
        notes.append(f"{oldest}; the bound is {facts.stretch.staleness}.")
    if facts.bubble_share >= 0.05:
        notes.append(f"Engines stood still {facts.bubble_share:.0%} of the time to load weights.")
    if facts.num_ended and facts.num_filtered / facts.num_ended >= 0.2:
        filtered = share(facts.num_filtered / facts.num_ended)
        notes.append(f"{filtered} of the groups were filtered: their prompts are too easy, or too hard.")
    if facts.num_failed:
        groups = "group" if facts.num_failed == 1 else "groups"
        notes.append(f"{facts.num_failed} {groups} failed, most by “{facts.worst_reason}”.")
    if facts.num_generator_deaths:
        times = "once" if facts.num_generator_deaths == 1 else f"{facts.num_generator_deaths} times"
        notes.append(f"The generator was replaced {times}; what it held was started again.")
    return notes
