"""The snapshot of a run, put together from what the hub's parts know. Reads the state, changes nothing.

Costs a fraction of a millisecond, once a second for each who looks.
"""

import time
from collections import deque
from typing import TypeVar

import msgspec

from fa_rollout.account.figures import StepFigures, TimeSpent
from fa_rollout.account.snapshot import (
    EngineState,
    GeneratorFigures,
    GroupFigures,
    RankFigures,
    RingFigures,
    RunFigures,
    RunPhase,
    Snapshot,
    StalenessFigures,
    Totals,
    TrainerFigures,
)
from fa_rollout.hub.core import Core
from fa_rollout.hub.flow.composition import staleness
from fa_rollout.hub.flow.flow import Flow
from fa_rollout.hub.measures.pulses import FAILING_S
from fa_rollout.hub.reporting.waits import waits
from fa_rollout.hub.state.world import Attachment
from trainer_hook.messages import EngineFigures, Pulse

T = TypeVar("T")

RECENT_S = 30.0
RECENT_STEPS = 5
"""What `recent` is about covers both, and ends where the run began."""


def take_snapshot(core: Core) -> Snapshot:
    """Where the run stands now."""
    now_s = time.monotonic()
    history, pulse = core.history, core.pulses.last
    return Snapshot(
        time_s=time.time(),
        run=_run(core, now_s),
        trainer=_trainer(core, now_s),
        groups=_groups(core),
        generator=_generator(core, now_s),
        engines=[] if pulse is None else [_engine(core, engine) for engine in pulse.engines],
        ring=_ring(core),
        staleness=_staleness(core),
        totals=Totals(
            steps=history.num_steps,
            samples=history.num_samples,
            trained_tokens=core.flow.meter.trained_tokens if core.flow else 0,
            dropped_tokens=core.flow.meter.dropped_tokens if core.flow else 0.0,
            updates=history.num_updates,
            bubble_s=history.bubble_s,
            warnings=history.num_warnings,
        ),
        waits=waits(core, now_s),
        slowest=[] if pulse is None else pulse.slowest,
        reasons=history.reasons(),
        warnings=history.warnings(),
    )


def with_history(core: Core, snapshot: Snapshot, *, steps_seen: int, updates_seen: int) -> Snapshot:
    """The same with the steps and updates that somebody has not seen who has seen so many."""
    history = core.history
    return msgspec.structs.replace(
        snapshot,
        totals=msgspec.structs.replace(snapshot.totals, steps=history.num_steps, updates=history.num_updates),
        steps=_latest(history.steps, history.num_steps - steps_seen),
        updates=_latest(history.updates, history.num_updates - updates_seen),
    )


def _latest(items: "deque[T]", count: int) -> list[T]:
    return list(items)[-count:] if count > 0 else []


def _run(core: Core, now_s: float) -> RunFigures:
    flow, rollout = core.flow, core.config.rollout
    phase = RunPhase.RUNNING if core.pulses.is_up or flow is not None else RunPhase.STARTING
    ending = core.stop_reason
    if core.fatal is not None:
        phase, ending = RunPhase.GIVEN_UP, core.fatal.text
    elif ending is not None:
        phase = RunPhase.ENDING
    return RunFigures(
        name=core.run,
        phase=phase,
        uptime_s=now_s - core.began_s,
        step=flow.step if flow else 0,
        num_trained=min(flow.open_steps, default=flow.step) if flow else 0,
        version=flow.version if flow else 0,
        lineage=core.lineage,
        num_steps=rollout.num_steps,
        groups_per_step=rollout.groups_per_step,
        samples_per_group=rollout.samples_per_group,
        update_interval=rollout.update_interval,
        staleness=rollout.staleness,
        staleness_policy=rollout.staleness_policy,
        ending=ending,
    )


def _trainer(core: Core, now_s: float) -> TrainerFigures:
    clock = core.clock
    lap = clock.lap(now_s)
    return TrainerFigures(
        phase=clock.phase,
        since_s=now_s - clock.since_s if clock.since_s else now_s - core.began_s,
        num_missing=core.world.num_missing,
        ranks=[_rank(core, rank, now_s) for rank in core.world.members.values()],
        first_wait_s=clock.first_wait_s,
        spent=clock.spent(now_s),
        recent=recent(list(core.history.steps), lap),
        in_update=core.updates.phase.value,
    )


def recent(steps: list[StepFigures], lap: TimeSpent) -> TimeSpent:
    """The time of the last steps and of the one that goes on, back to the first one of the trainer's life."""
    taken = lap
    for num_taken, step in enumerate(reversed(steps)):
        if step.is_first or (taken.total_s >= RECENT_S and num_taken >= RECENT_STEPS):
            break
        taken = taken.plus(step.spent)
    return taken


def _rank(core: Core, rank: Attachment, now_s: float) -> RankFigures:
    phase, since_s = core.clock.rank(rank, now_s)
    step = core.steps.current(rank) if rank.waiting is None else rank.waiting.step
    return RankFigures(
        dp_rank=rank.hello.dp_rank,
        peer=rank.hello.peer,
        pid=rank.hello.pid,
        phase=phase,
        since_s=since_s,
        step=step,
        num_leases=core.table.num_held(rank.number),
    )


def _groups(core: Core) -> GroupFigures:
    if core.flow is None:
        return GroupFigures()
    now = core.flow.books.counts()
    return GroupFigures(
        taken=now.taken,
        queued=now.queued,
        issued=now.issued,
        running=now.running,
        committed=now.committed,
        handed=now.handed,
        trained=now.trained,
        filtered=now.filtered,
        failed=now.failed,
        dropped=now.dropped,
        credits=core.flow.num_credits,
        limit=limit_of(core.flow),
    )


def limit_of(flow: Flow) -> str:
    """What holds further groups back, in words; empty where nothing does."""
    books = flow.books
    if flow.held:
        return "hook.pause()"
    if flow.weights_pending:
        return "weights of the checkpoint"
    if books.num_left == 0 and not books.counts().queued:
        return "prompts that are fed" if books.stream.is_open else "the end of the data"
    return flow.tightest_limit


def _generator(core: Core, now_s: float) -> GeneratorFigures:
    pulse, pulses = core.pulses.last or Pulse(), core.pulses
    return GeneratorFigures(
        is_up=core.pulses.is_up,
        num_restarts=max(0, core.table.incarnation - 1),
        pulse_age_s=pulses.age_s(now_s),
        num_queued=pulse.num_queued,
        num_running=pulse.num_running,
        num_waiting_for_ring=pulse.num_waiting_for_ring,
        in_flight=pulse.in_flight,
        waiting_for_engines=pulse.waiting_for_engines,
        capacity=pulses.concurrency,
        load=pulses.load,
        busy=pulses.busy,
        is_paused=pulse.is_paused,
        rewards_in_progress=pulse.rewards_in_progress,
        rewards_failed=pulse.rewards_failed,
        evaluations=pulse.evaluations,
        tokens_total=pulses.total("tokens"),
        requests_total=pulses.total("requests"),
        aborts_total=pulses.total("aborts"),
        restarts_total=pulses.total("restarts"),
        discarded_tokens_total=pulses.total("discarded_tokens"),
        tokens_per_s=pulses.tokens_per_s,
        loop_gap_ms=pulse.loop_gap_ms,
    )


def _engine(core: Core, engine: EngineFigures) -> EngineState:
    is_paused = core.pulses.last is not None and core.pulses.last.is_paused
    health = "out" if engine.is_out or engine.url in core.membership.down else "paused" if is_paused else "ok"
    if health == "ok" and engine.allowed < engine.capacity:
        health = "narrowed"
    if health in ("ok", "narrowed") and engine.failing_s > FAILING_S:
        health = "failing"
    return EngineState(
        url=engine.url, health=health, now=engine, tokens_per_s=core.pulses.engine_tokens_per_s(engine.url)
    )


def _ring(core: Core) -> RingFigures:
    used, oldest = core.table.statistics(), core.table.oldest_lease()
    names = {rank.number: rank.name for rank in core.world.members.values()}
    return RingFigures(
        bytes=used.size_bytes,
        span_bytes=used.span_bytes,
        live_bytes=used.live_bytes,
        watermark_bytes=used.watermark_bytes,
        num_records=used.num_live,
        oldest_lease_s=used.oldest_lease_s,
        oldest_lease_of=None if oldest is None else names.get(oldest[1], "a rank that is gone"),  # type: ignore[call-overload]
        mean_record_bytes=core.flow.meter.mean_record_bytes if core.flow else 0.0,
        num_refused=core.flow.meter.num_refused if core.flow else 0,
    )


def _staleness(core: Core) -> StalenessFigures:
    flow = core.flow
    if flow is None:
        return StalenessFigures()
    running = [flow.version - group.version for group in flow.books.running() if group.version is not None]
    ready = [
        staleness(flow.version, group.commit.oldest_version)
        for group in flow.books.committed()
        if group.commit is not None
    ]
    known = [age for age in ready if age is not None]
    return StalenessFigures(
        running_max=max(running, default=None),
        ready_max=max(known, default=None),
        trained_max=core.history.staleness_max,
    )
