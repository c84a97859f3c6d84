"""Is the run healthy, and if not, why? Pure: a snapshot in, a sentence out.

The question that counts is whether the trainer waits for data. If it does, one thing holds generation back,
and that is named with the knob that moves it.
"""

from dataclasses import dataclass
from enum import StrEnum

from fa_rollout.observe.snapshot import EngineState, RankFigures, RunPhase, Snapshot, TrainerPhase
from fa_rollout.observe.words import seconds, share

IDLE_OK = 0.05
IDLE_BAD = 0.2
FULL = 0.8
"""Share of the engines' slots from which on they count as busy."""
SILENT_S = 5.0
"""A generator that reports every second."""
LONG_S, LONG_STEPS = 60.0, 10.0
"""A phase is suspicious when it takes longer than both: this time, and so many mean steps."""


class Level(StrEnum):
    """How much somebody should look."""

    OK = "ok"
    NOTE = "note"
    """Nothing is wrong, and it could be better; or the run begins, or ends."""
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to know at a glance."""

    level: Level
    headline: str
    why: str = ""
    """The cause, and the way out."""


def judge(snapshot: Snapshot) -> Verdict:
    """The first thing that is to be said of a run."""
    return _of_life(snapshot) or _of_trainer(snapshot) or _of_flow(snapshot)


def _of_life(now: Snapshot) -> Verdict | None:
    """A run that begins, ends, or lacks a part."""
    generator, out = now.generator, [e for e in now.engines if e.health == "out"]
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
        return Verdict(level=Level.BAD, headline="no engine answers", why=_last_error(out))
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
        why = "; ".join(f"{wait.who} waits for {wait.what}" for wait in now.waits[:1])
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


def _of_flow(now: Snapshot) -> Verdict:
    """Whether the trainer waits for data, and for whose sake."""
    idle, load = now.trainer.recent.idle, now.generator.load
    if idle is None:
        groups, wanted = now.groups, now.run.groups_per_step
        why = f"{groups.committed} of {wanted} groups are ready, {groups.running} are running"
        return Verdict(level=Level.NOTE, headline="the first batch is being made", why=why)
    busy = "" if load is None else f"engines busy {share(load)}"
    if idle <= IDLE_OK:
        headline = f"healthy: trainer waits {share(idle)}{busy and f', {busy}'}"
        return Verdict(level=Level.OK, headline=headline, why=_remark(now))
    level = Level.WARN if idle >= IDLE_BAD else Level.NOTE
    cause, remedy = _cause(now)
    headline = f"trainer waits {share(idle)} for data: {cause}"
    return Verdict(level=level, headline=headline, why="; ".join(filter(None, (remedy, busy))))


def _cause(now: Snapshot) -> tuple[str, str]:
    """(what holds generation back, what to do)."""
    generator, groups = now.generator, now.groups
    load = 1.0 if generator.load is None else generator.load
    out = [engine for engine in now.engines if engine.health == "out"]
    settled = groups.trained + groups.filtered
    if generator.num_waiting_for_ring or groups.limit == "room in the ring":
        return "the ring is full", f"raise ring.bytes: a record takes {now.ring.mean_record_bytes:,.0f} bytes"
    if out:
        return f"{len(out)} of {len(now.engines)} engines are out", _last_error(out)
    if generator.rewards_in_progress > max(generator.in_flight, now.run.samples_per_group):
        scored = f"{generator.rewards_in_progress} samples wait for their reward"
        return "rewards are the bottleneck", f"{scored}: raise reward.num_workers, or make the reward async"
    if settled and groups.filtered > settled / 2:
        rate = share(groups.filtered / settled)
        return f"the filter rejects {rate}", "prompts of middling difficulty make more of the same engines"
    if load >= FULL or generator.waiting_for_engines:
        remedy = "add engines, or raise engine.max_concurrent_samples if they have room; shorten answers"
        return "engines are the bottleneck", remedy
    if groups.limit == "the staleness bound":
        bound = f"rollout.staleness = {now.run.staleness}"
        return "the staleness bound holds generation back", f"{bound}: raise it, or speed the engines up"
    waits = [wait.what for wait in now.waits if wait.what.startswith("a batch")]
    return "generation is the bottleneck", f"it waits for {waits[0]}" if waits else _remark(now)


def _remark(now: Snapshot) -> str:
    """What is worth a look in a run that is well."""
    recent, groups = now.trainer.recent, now.groups
    settled = groups.trained + groups.failed
    if settled and groups.failed > 0.05 * settled:
        worst = next((reason for reason in now.reasons if reason.outcome == "failed"), None)
        return f"{groups.failed} groups have failed" + (f": {worst.reason}" if worst else "")
    if recent.total_s and recent.updating > 0.3 * recent.total_s:
        return f"weight updates take {share(recent.updating / recent.total_s)} of the trainer's time"
    out = [engine for engine in now.engines if engine.health == "out"]
    if out:
        return f"{len(out)} of {len(now.engines)} engines are out: {_last_error(out)}"
    if now.generator.loop_gap_ms > 500:
        return f"the generator's loop hung for {now.generator.loop_gap_ms:.0f} ms: code of yours blocks it"
    if now.generator.load is not None and now.generator.load < 0.5 and groups.limit == "the staleness bound":
        return "the trainer is the bottleneck: engines stand still until it takes what the bound allows"
    return ""


def names(ranks: list[RankFigures], num_all: int) -> str:
    """`rank 3`, `ranks 0, 1`, `all ranks`, with their verb."""
    if len(ranks) == num_all > 1:
        return f"all {num_all} ranks are"
    numbers = ", ".join(f"{rank.dp_rank}" for rank in ranks[:4]) + (" ..." if len(ranks) > 4 else "")
    return f"rank {numbers} is" if len(ranks) == 1 else f"ranks {numbers} are"


def _suspicious_s(now: Snapshot) -> float:
    return max(LONG_S, LONG_STEPS * (_mean_step_s(now) or LONG_S))


def _mean_step_s(now: Snapshot) -> float | None:
    spent = now.trainer.spent
    trained = now.totals.steps
    return (spent.total_s - now.trainer.since_s) / trained if trained else None


def _step(now: Snapshot) -> str:
    mean_s = _mean_step_s(now)
    return "an unknown time" if mean_s is None else f"{seconds(mean_s)} on average"


def _last_error(engines: list[EngineState]) -> str:
    worst = engines[0]
    return f"{worst.url}: {worst.now.last_error or 'no answer'}"
