"""The verdict on a run: is it healthy, and if not, why? Pure.

In: snapshots of a run that is going on, or the figures of a whole run. Out: a verdict. A live run is first
checked for what is missing or stuck; what limits its speed is decided by the rules of `bound` for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fa_rollout.account.bound import Bound, Level, Stretch, bound_of, headline, holds_of, level_of, remedies
from fa_rollout.account.snapshot import STALENESS_LIMIT, RankFigures, RunPhase, Snapshot, TrainerPhase
from fa_rollout.account.words import seconds, share

SILENT_S = 5.0
"""A generator that reports every second."""
LONG_S, LONG_STEPS = 60.0, 10.0
"""A phase is suspicious when it takes longer than both: this time, and this many mean steps."""
LOADING_S = 10.0
"""The same for engines that load weights; there the mean is over updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict in brief."""

    level: Level
    headline: str
    why: str = ""
    """The cause, and what to do."""
    bound: Bound | None = None
    """What limits the run; None if it was not determined."""
    notes: list[str] = field(default_factory=list)
    """Further findings on a whole run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The input of the verdict on a whole run."""

    stretch: Stretch
    """Since its first batch."""
    staleness_max: int | None = None
    """That was seen."""
    bubble_share: float = 0.0
    """Share of wall time in which engines were paused for updates."""
    num_ended: int = 0
    """Groups that ended."""
    num_filtered: int = 0
    num_failed: int = 0
    worst_reason: str = ""
    num_generator_deaths: int = 0
    mistake: str = ""
    """Why it ended early; empty if it did not."""


def judge(now: Snapshot, looks: Sequence[Snapshot] = ()) -> Verdict:
    """The most important thing about a live run; `looks`: the latest snapshots, to judge by."""
    return _of_life(now) or _of_trainer(now) or _of_flow(now, looks or [now])


def judge_run(facts: RunFacts) -> Verdict:
    """The verdict on a whole run."""
    verdict = _of_stretch(facts.stretch)
    level, told = verdict.level, verdict.headline
    if facts.mistake:
        level, told = Level.BAD, f"the run ended early: {facts.mistake}; until then: {told}"
    return Verdict(level=level, headline=told, why=verdict.why, bound=verdict.bound, notes=_notes(facts))


def _of_stretch(stretch: Stretch) -> Verdict:
    bound = bound_of(stretch)
    return Verdict(
        level=level_of(bound, stretch),
        headline=headline(bound, stretch),
        why=" ".join(remedies(bound, stretch)),
        bound=bound,
    )


def _of_life(now: Snapshot) -> Verdict | None:
    """A run that is starting or ending, or lacks a part."""
    generator, out = now.generator, now.engines_out
    if now.run.phase is RunPhase.GIVEN_UP:
        return Verdict(level=Level.BAD, headline="the run has failed", why=now.run.ending or "")
    if now.run.phase is RunPhase.ENDING:
        return Verdict(level=Level.NOTE, headline="the run is ending", why=now.run.ending or "")
    if not generator.is_up:
        if now.run.phase is RunPhase.STARTING:
            why = (
                f"the generator has been reading the data and connecting to the engines for "
                f"{seconds(now.run.uptime_s)}"
            )
            return Verdict(level=Level.NOTE, headline="starting", why=why)
        why = f"{now.groups.committed} finished groups can be trained meanwhile"
        return Verdict(level=Level.BAD, headline="no generator: a new one is starting", why=why)
    if generator.pulse_age_s is not None and generator.pulse_age_s > SILENT_S:
        silent = f"the generator has not reported for {seconds(generator.pulse_age_s)}"
        why = "it is stopped, lacks CPU time, or your code blocks its event loop; see run.heartbeat_s"
        return Verdict(level=Level.WARN, headline=silent, why=why)
    if out and len(out) == len(now.engines):
        return Verdict(level=Level.BAD, headline="no engine responds", why=out[0].complaint)
    return None


def _of_trainer(now: Snapshot) -> Verdict | None:
    """A trainer that is missing or stuck."""
    trainer = now.trainer
    if trainer.phase is TrainerPhase.ABSENT:
        why = f"{now.groups.committed} groups are ready; the trainer finds the run by FA_ROLLOUT_ADDRESS"
        return Verdict(level=Level.NOTE, headline="waiting for the trainer to connect", why=why)
    if trainer.phase is TrainerPhase.ATTACHING:
        missing = f"waiting for {trainer.num_missing} more ranks to connect"
        return Verdict(level=Level.NOTE, headline=missing, why=f"for {seconds(trainer.since_s)}")
    if trainer.phase is not TrainerPhase.WAITING and trainer.since_s > _suspicious_s(now):
        return _stuck(now)
    return None


def _stuck(now: Snapshot) -> Verdict:
    trainer = now.trainer
    since = seconds(trainer.since_s)
    if trainer.phase is TrainerPhase.UPDATING and trainer.in_update == "publishing":
        lost = now.engines_out
        why = lost[0].complaint if lost else "see the engines' logs and the generator's warnings"
        return Verdict(level=Level.WARN, headline=f"engines have been loading weights for {since}", why=why)
    busy = [rank for rank in trainer.ranks if rank.phase is trainer.phase]
    doing = {
        TrainerPhase.TRAINING: f"in step {busy[0].step if busy else now.run.step}",
        TrainerPhase.UPDATING: "in a weight update",
    }.get(trainer.phase, "between two calls of the hook")
    pids = " ".join(str(rank.pid) for rank in busy[:4])
    return Verdict(
        level=Level.WARN,
        headline=f"{names(busy, len(trainer.ranks))} {doing} for {since}; a step takes {_step(now)}",
        why=f"to see where: py-spy dump --pid {pids.split()[0] if pids else '...'}"
        + (f" (pids {pids})" if len(busy) > 1 else ""),
    )


def _of_flow(now: Snapshot, looks: Sequence[Snapshot]) -> Verdict:
    """What limits the run's speed."""
    if now.trainer.recent.idle is None:
        groups, wanted = now.groups, now.run.groups_per_step
        why = f"{groups.committed} of {wanted} groups are ready, {groups.running} are in progress"
        return Verdict(level=Level.NOTE, headline="generating the first batch", why=why)
    verdict = _of_stretch(stretch_of(now, looks))
    return replace(verdict, why=_remark(now)) if verdict.bound is Bound.TRAINING else verdict


def stretch_of(now: Snapshot, looks: Sequence[Snapshot]) -> Stretch:
    """The last steps, in the form that the rules take."""
    settled = now.groups.trained + now.groups.filtered
    return Stretch(
        spent=now.trainer.recent,
        staleness=now.run.staleness,
        busy=now.generator.busy,
        filtered=now.groups.filtered / settled if settled else 0.0,
        num_engines=len(now.engines),
        holds=holds_of(looks),
    )


def _remark(now: Snapshot) -> str:
    """The details of a healthy run."""
    groups = now.groups
    settled = groups.trained + groups.failed
    if settled and groups.failed > 0.05 * settled:
        worst = next((reason for reason in now.reasons if reason.outcome == "failed"), None)
        return f"{groups.failed} groups have failed" + (f": {worst.reason}" if worst else "")
    out = now.engines_out
    if out:
        return f"{len(out)} of {len(now.engines)} engines are out: {out[0].complaint}"
    if now.generator.loop_gap_ms > 500:
        return f"the generator's event loop was blocked for {now.generator.loop_gap_ms:.0f} ms by your code"
    if now.generator.busy is not None and now.generator.busy < 0.5 and groups.limit == STALENESS_LIMIT:
        return "training is the bottleneck: engines pause because the staleness limit is reached"
    return ""


def names(ranks: list[RankFigures], num_all: int) -> str:
    """`rank 3`, `ranks 0, 1`, `all ranks`, with their verb."""
    if len(ranks) == num_all > 1:
        return f"all {num_all} ranks are"
    numbers = ", ".join(f"{rank.dp_rank}" for rank in ranks[:4]) + (" ..." if len(ranks) > 4 else "")
    return f"rank {numbers} is" if len(ranks) == 1 else f"ranks {numbers} are"


def _suspicious_s(now: Snapshot) -> float:
    num_updates, spent = now.totals.updates, now.trainer.spent
    if now.trainer.in_update == "publishing" and num_updates:
        return max(LOADING_S, LONG_STEPS * (spent.updating - now.trainer.since_s) / num_updates)
    return max(LONG_S, LONG_STEPS * (mean_step_s(now) or LONG_S))


def mean_step_s(now: Snapshot) -> float | None:
    """Of all steps of this life of the hub."""
    spent = now.trainer.spent
    trained = now.totals.steps
    return (spent.total_s - now.trainer.since_s) / trained if trained else None


def _step(now: Snapshot) -> str:
    mean_s = mean_step_s(now)
    return "an unknown time" if mean_s is None else f"{seconds(mean_s)} on average"


def _notes(facts: RunFacts) -> list[str]:
    notes = []
    if facts.staleness_max is not None:
        versions = "version" if facts.staleness_max == 1 else "versions"
        oldest = f"The stalest sample was {facts.staleness_max} {versions} old"
        notes.append(f"{oldest}; the limit is {facts.stretch.staleness}.")
    if facts.bubble_share >= 0.05:
        notes.append(f"Engines were paused {share(facts.bubble_share)} of the time to load weights.")
    if facts.num_ended and facts.num_filtered / facts.num_ended >= 0.2:
        filtered = share(facts.num_filtered / facts.num_ended)
        notes.append(f"{filtered} of the groups were filtered: their prompts are too easy or too hard.")
    if facts.num_failed:
        groups = "group" if facts.num_failed == 1 else "groups"
        notes.append(f"{facts.num_failed} {groups} failed, most often with “{facts.worst_reason}”.")
    if facts.num_generator_deaths:
        times = "once" if facts.num_generator_deaths == 1 else f"{facts.num_generator_deaths} times"
        notes.append(f"The generator was replaced {times}; the groups it was working on started again.")
    return notes
