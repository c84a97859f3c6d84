"""Snapshots to test with: a healthy run, and changes to it."""

from typing import Any

import msgspec

from fa_rollout.account.figures import StepFigures, TimeSpent, UpdateFigures
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
    TrainerPhase,
)
from trainer_hook.messages import EngineFigures, Lingering


def step(number: int, **changes: Any) -> StepFigures:
    figures = StepFigures(
        step=number,
        version=number,
        time_s=1000.0 + number,
        num_groups=16,
        num_samples=128,
        num_tokens=64_000,
        response_tokens=64_000,
        reward_mean=0.1 + 0.01 * number,
        staleness_max=1,
        staleness_mean=0.5,
        spent=TimeSpent(waiting=0.02, training=0.8, updating=0.15, outside=0.03),
    )
    return msgspec.structs.replace(figures, **changes)


def rank(number: int, phase: TrainerPhase = TrainerPhase.TRAINING, since_s: float = 0.4) -> RankFigures:
    return RankFigures(
        dp_rank=number, peer=0, pid=4000 + number, phase=phase, since_s=since_s, step=50, num_leases=8
    )


def engine(number: int, health: str = "ok", **figures: Any) -> EngineState:
    url = f"http://10.0.0.{number}:30000"
    now = EngineFigures(url=url, in_flight=120, allowed=128, capacity=128, version="ab12cd34:49")
    return EngineState(url=url, health=health, now=msgspec.structs.replace(now, **figures), tokens_per_s=2e3)


def healthy() -> Snapshot:
    """Step 50 of 200, the trainer waits 2 % of its time, two engines are nearly full."""
    return Snapshot(
        time_s=2000.0,
        run=RunFigures(
            name="0123456789abcdef",
            phase=RunPhase.RUNNING,
            uptime_s=75.0,
            step=51,
            num_trained=50,
            version=50,
            lineage="ab12cd34",
            num_steps=200,
            groups_per_step=16,
            samples_per_group=8,
            update_interval=1,
            staleness=2,
            staleness_policy="wait",
        ),
        trainer=TrainerFigures(
            phase=TrainerPhase.TRAINING,
            since_s=0.4,
            num_missing=0,
            ranks=[rank(0), rank(1)],
            first_wait_s=9.0,
            spent=TimeSpent(waiting=1.0, training=40.0, updating=7.5, outside=1.5),
            recent=TimeSpent(waiting=0.6, training=24.0, updating=4.5, outside=0.9),
        ),
        groups=GroupFigures(
            taken=900, issued=10, running=30, committed=8, handed=16, trained=800, filtered=30, failed=6
        ),
        generator=GeneratorFigures(
            is_up=True,
            pulse_age_s=0.5,
            num_running=30,
            in_flight=240,
            capacity=256,
            load=0.97,
            busy=0.97,
            tokens_total=3_300_000,
            tokens_per_s=4100.0,
        ),
        engines=[engine(1), engine(2)],
        ring=RingFigures(
            bytes=1 << 30,
            span_bytes=1 << 28,
            live_bytes=1 << 28,
            watermark_bytes=1 << 29,
            num_records=24,
            oldest_lease_s=0.4,
            oldest_lease_of="rank 0 (pid 4000)",
            mean_record_bytes=1e7,
        ),
        staleness=StalenessFigures(running_max=1, ready_max=0, trained_max=2),
        totals=Totals(steps=50, samples=6400, trained_tokens=3_200_000, updates=50, bubble_s=2.0),
        steps=[step(number) for number in range(50)],
        updates=[UpdateFigures(version=50, time_s=1999.0, write_s=0.1, load_s=0.05, bubble_s=0.04)],
        slowest=[Lingering(name="group 880", age_s=31.0, where="2 samples to go")],
    )


def changed(snapshot: Snapshot, **parts: dict[str, Any] | Any) -> Snapshot:
    """The same with fields of its parts changed: `trainer={"since_s": 3.0}`; lists are given whole."""
    values = {
        name: msgspec.structs.replace(getattr(snapshot, name), **change)
        if isinstance(change, dict)
        else change
        for name, change in parts.items()
    }
    return msgspec.structs.replace(snapshot, **values)
