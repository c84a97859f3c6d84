"""Is the run healthy, and if not, why? Pure: a snapshot in, a sentence out.

First what is missing or sticks, which only a run that goes on has; then what its last steps hung on, by the
rules of `bound`, which the report goes by too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fa_rollout.observe.bound import (
    AT_BOUND,
    NO_WAITS,
    Bound,
    Level,
    Stretch,
    bound_of,
    holder,
    holds_of,
    level_of,
    remedies,
)
from fa_rollout.observe.snapshot import RankFigures, RunPhase, Snapshot, TrainerPhase
from fa_rollout.observe.words import seconds, share

SILENT_S = 5.0
"""A generator that reports every second."""
LONG_S, LONG_STEPS = 60.0, 10.0
"""A phase is suspicious when it takes longer than both: this time, and so many mean steps."""
LOADING_S = 10.0
"""The same of engines that load weights; there the mean is that of the updates so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to know at a glance."""

    level: Level
    headline: str
    why: str = ""
    """The cause, and the way out."""


def judge(now: Snapshot, looks: Sequence[Snapshot] = ()) -> Verdict:
    """The first thing that is to be said of a run; `looks`: the latest, so that a moment decides nothing."""
    return _of_life(now) or _of_trainer(now) or _of_flow(now, looks or [now])


def _of_life(now: Snapshot) -> Verdict | None:
    """A run that begins, ends, or lacks a part."""
    generator, out = now.generator, now.engines_out
    if now.run.phase is RunPhase.GIVEN_UP:
        return Verdict(level=Level.BAD, headline="the run was given up", why=now.run.ending or "")
    if now.run.phase is RunPhase.ENDING:
        return Verdict(level=Level.NOTE, headline="the run ends", why=now.run.ending or "")
    if not generator.is_up:
        if now.run.phase is RunPhase.STARTING:
            why = (
                f"for {seconds(now.run.uptime_s)} the generator has read the data and looked for its engines"
            )
            return Verdict(level=Level.NOTE, headline="starting", why=why)
        why = f"{now.groups.committed} finished groups are left to train meanwhile"
        return Verdict(level=Level.BAD, headline="no generator: the next one starts", why=why)
    if generator.pulse_age_s is not None and generator.pulse_age_s > SILENT_S:
        headline = f"the generator has been silent for {seconds(generator.pulse_age_s)}"
        why = "it is stopped, starved of CPU, or code of yours blocks its loop; see run.heartbeat_s"
        return Verdict(level=Level.WARN, headline=headline, why=why)
    if out and len(out) == len(now.engines):
        return Verdict(level=Level.BAD, headline="no engine answers", why=out[0].complaint)
    return None


def _of_trainer(now: Snapshot) -> Verdict | None:
    """A trainer that is not there, or sticks."""
    trainer = now.trainer
    if trainer.phase is TrainerPhase.ABSENT:
        why = f"{now.groups.committed} groups are ready for it; it finds the run by FA_ROLLOUT_ADDRESS"
        return Verdict(level=Level.NOTE, headline="no trainer is attached", why=why)
    if trainer.phase is TrainerPhase.ATTACHING:
        headline = f"{trainer.num_missing} ranks of the trainer have not attached yet"
        return Verdict(level=Level.NOTE, headline=headline, why=f"for {seconds(trainer.since_s)}")
    if trainer.phase is not TrainerPhase.WAITING and trainer.since_s > _suspicious_s(now):
        return _stuck(now)
    return None


def _stuck(now: Snapshot) -> Verdict:
    trainer = now.trainer
    since = seconds(trainer.since_s)
    if trainer.phase is TrainerPhase.UPDATING and trainer.in_update == "publishing":
        lost = now.engines_out
        why = lost[0].complaint if lost else "see the engines' own logs, and the generator's warnings"
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
        why=f"where it stands: py-spy dump --pid {pids.split()[0] if pids else '...'}"
        + (f" (pids {pids})" if len(busy) > 1 else ""),
    )


def _of_flow(now: Snapshot, looks: Sequence[Snapshot]) -> Verdict:
    """Whether the trainer waits for data, and for whose sake."""
    idle = now.trainer.recent.idle
    if idle is None:
        groups, wanted = now.groups, now.run.groups_per_step
        why = f"{groups.committed} of {wanted} groups are ready, {groups.running} are in progress"
        return Verdict(level=Level.NOTE, headline="the first batch is being made", why=why)
    stretch = stretch_of(now, looks)
    bound = bound_of(stretch)
    level = level_of(bound, stretch)
    if bound is Bound.TRAINING:
        busy = "" if stretch.load is None else f", engines busy {share(stretch.load)}"
        return Verdict(level=level, headline=f"healthy: trainer waits {share(idle)}{busy}", why=_remark(now))
    headline = f"trainer waits {share(idle)} for data; held up by {holder(bound, stretch)}"
    if bound in NO_WAITS:
        headline = f"trainer is held up by {holder(bound, stretch)}; waits {share(idle)} for data"
    return Verdict(level=level, headline=headline, why=" ".join(remedies(bound, stretch)))


def stretch_of(now: Snapshot, looks: Sequence[Snapshot]) -> Stretch:
    """The last steps, as the rules want them."""
    settled = now.groups.trained + now.groups.filtered
    return Stretch(
        spent=now.trainer.recent,
        staleness=now.run.staleness,
        load=now.generator.load,
        filtered=now.groups.filtered / settled if settled else 0.0,
        num_engines=len(now.engines),
        holds=holds_of(looks),
    )


def _remark(now: Snapshot) -> str:
    """What is worth a look in a run that is well."""
    groups = now.groups
    settled = groups.trained + groups.failed
    if settled and groups.failed > 0.05 * settled:
        worst = next((reason for reason in now.reasons if reason.outcome == "failed"), None)
        return f"{groups.failed} groups have failed" + (f": {worst.reason}" if worst else "")
    out = now.engines_out
    if out:
        return f"{len(out)} of {len(now.engines)} engines are out: {out[0].complaint}"
    if now.generator.loop_gap_ms > 500:
        return f"the generator's loop hung for {now.generator.loop_gap_ms:.0f} ms: code of yours blocks it"
    if now.generator.load is not None and now.generator.load < 0.5 and groups.limit == AT_BOUND:
        return "the trainer is the bottleneck: engines stand still until it takes what the bound allows"
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
