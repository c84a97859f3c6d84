"""The table of metrics: every figure that leaves a run for somebody else's dashboard, once.

In: a snapshot. Out: samples by metric. Names follow the OpenMetrics conventions: `fa_rollout_` first, base
units, `_total` for what only grows. A label's values are few: engines, phases, outcomes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any

from fa_rollout.account.snapshot import EngineState, Snapshot, TrainerPhase

PREFIX = "fa_rollout"
UNITS = ("seconds", "bytes", "ratio", "versions")
Sample = tuple[tuple[str, ...], float]
"""(values of the labels, value)."""
Read = Callable[[Snapshot], Iterable[Sample]]


class Kind(StrEnum):
    """What a value does over time."""

    GAUGE = "gauge"
    COUNTER = "counter"
    """Only grows, from 0 at each life of the hub; those of engines at each life of the generator."""
    SUMMARY = "summary"
    """Quantiles of the latest observations; `quantile` is the last label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One family."""

    name: str
    """Without prefix, and without `_total`."""
    kind: Kind
    help: str
    labels: tuple[str, ...]
    read: Read

    @property
    def unit(self) -> str:
        """The end of the name, where that is a unit."""
        return next((unit for unit in UNITS if self.name.endswith(f"_{unit}")), "")

    @property
    def full_name(self) -> str:
        """As a scraper stores it."""
        return f"{PREFIX}_{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"


def _gauge(name: str, read: str | Read, help: str, *labels: str) -> Metric:
    return Metric(name=name, kind=Kind.GAUGE, help=help, labels=labels, read=_reader(read))


def _counter(name: str, read: str | Read, help: str, *labels: str) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, help=help, labels=labels, read=_reader(read))


def _reader(read: str | Read) -> Read:
    """A path in the snapshot is one sample; none where that is None."""
    if not isinstance(read, str):
        return read
    value = attrgetter(read)
    return lambda now: _one(value(now))


def _one(value: float | None) -> Iterable[Sample]:
    return () if value is None else (((), float(value)),)


def _last(items: str, name: str) -> Read:
    """A figure of the last step or update."""

    def read(now: Snapshot) -> Iterable[Sample]:
        latest = getattr(now, items)
        return _one(attrgetter(name)(latest[-1])) if latest else ()

    return read


def _fields(part: str, *names: str) -> Read:
    """Several fields of one part, the name as label."""
    whole = attrgetter(part)
    return lambda now: [((name,), float(getattr(whole(now), name))) for name in names]


def _engines(value: Callable[[EngineState], float]) -> Read:
    return lambda now: [((engine.url,), float(value(engine))) for engine in now.engines]


def _of_engines(part: str, name: Callable[[str], str] = str) -> Read:
    """A table of each engine, its keys as second label."""

    def read(now: Snapshot) -> Iterable[Sample]:
        for engine in now.engines:
            table: dict[str, Any] = getattr(engine.now, part)
            yield from (((engine.url, name(key)), float(value)) for key, value in table.items())

    return read


def _quantile(name: str) -> str:
    """`p50` to `0.5`."""
    return f"{int(name[1:]) / 100:g}"


def _phases(now: Snapshot) -> Iterable[Sample]:
    return [((phase.value,), float(phase is now.trainer.phase)) for phase in TrainerPhase]


def _loop_gap(now: Snapshot) -> Iterable[Sample]:
    return _one(now.generator.loop_gap_ms / 1000)


METRICS = (
    # --- steps ---
    _counter("steps", "totals.steps", "Steps that every rank has trained."),
    _gauge("step", "run.num_trained", "Steps trained, those before a checkpoint included."),
    _counter("samples", "totals.samples", "Samples of trained steps."),
    _counter("trained_tokens", "totals.trained_tokens", "Response tokens of trained steps."),
    _gauge("reward_mean", _last("steps", "reward_mean"), "Mean reward of the last step."),
    _gauge("step_duration_seconds", _last("steps", "spent.total_s"), "Duration of the last step."),
    _gauge(
        "staleness_versions", _last("steps", "staleness_max"), "Age of the oldest token of the last step."
    ),
    _gauge("staleness_mean_versions", _last("steps", "staleness_mean"), "Mean over the last step's groups."),
    _gauge("staleness_bound_versions", "run.staleness", "The bound, rollout.staleness."),
    _gauge("staleness_running_versions", "staleness.running_max", "Age of the oldest group that runs."),
    # --- trainer ---
    _gauge("trainer_idle_ratio", "trainer.recent.idle", "Share of recent time spent waiting for data."),
    _counter(
        "trainer_time_seconds",
        _fields("trainer.spent", "waiting", "waiting_for_ranks", "training", "updating", "outside"),
        "The trainer's time since its first batch, mean over ranks.",
        "phase",
    ),
    _gauge("trainer_phase", _phases, "1 for what the trainer does now.", "phase"),
    _gauge("trainer_phase_age_seconds", "trainer.since_s", "For how long it has done so."),
    # --- groups of samples ---
    _gauge(
        "groups",
        _fields("groups", "queued", "issued", "running", "committed", "handed"),
        "Prompt groups that are not settled.",
        "place",
    ),
    _counter(
        "groups_ended",
        _fields("groups", "trained", "filtered", "failed", "dropped"),
        "Settled prompt groups.",
        "outcome",
    ),
    _counter("groups_taken", "groups.taken", "Prompt groups taken from the data."),
    _counter("dropped_tokens", "totals.dropped_tokens", "Response tokens of dropped groups."),
    # --- generator ---
    _gauge("generator_up", "generator.is_up", "1 while a generator lives that can take groups."),
    _counter("generator_restarts", "generator.num_restarts", "Replacements of the generator."),
    _gauge(
        "generator_loop_gap_seconds", _loop_gap, "Longest time its event loop was blocked in the last second."
    ),
    _counter("tokens", "generator.tokens_total", "Tokens that engines answered with."),
    _gauge("tokens_per_second", "generator.tokens_per_s", "The same, mean of half a minute."),
    _counter("discarded_tokens", "generator.discarded_tokens_total", "Tokens thrown away by restarts."),
    _counter("requests", "generator.requests_total", "Requests sent to engines."),
    _counter("aborts", "generator.aborts_total", "Answers that an abort ended."),
    _gauge("requests_in_flight", "generator.in_flight", "Requests at engines."),
    _gauge("requests_waiting", "generator.waiting_for_engines", "Requests that wait for a slot."),
    _gauge("rewards_in_progress", "generator.rewards_in_progress", "Samples being scored."),
    _counter(
        "rewards_failed", "generator.rewards_failed", "Rewards that raised, timed out or were no number."
    ),
    # --- engines ---
    _gauge("engine_load_ratio", "generator.load", "Share of all slots in use, mean of half a minute."),
    _gauge("engine_busy_ratio", "generator.busy", "Share of the tokens per second that engines can make."),
    _gauge("engine_up", _engines(lambda e: e.health != "out"), "1 while requests flow to it.", "engine"),
    _gauge("engine_requests_in_flight", _engines(lambda e: e.now.in_flight), "Requests at it.", "engine"),
    _gauge("engine_slots", _engines(lambda e: e.now.allowed), "Requests that it may hold now.", "engine"),
    _counter("engine_requests", _engines(lambda e: e.now.num_done), "Requests that it answered.", "engine"),
    _counter("engine_tokens", _engines(lambda e: e.now.num_tokens), "Tokens of its answers.", "engine"),
    _counter("engine_failures", _of_engines("failures"), "Attempts that failed.", "engine", "class"),
    Metric(
        name="engine_latency_seconds",
        kind=Kind.SUMMARY,
        help="Duration of its latest answers.",
        labels=("engine", "quantile"),
        read=_of_engines("latency_s", _quantile),
    ),
    # --- ring ---
    _gauge("ring_size_bytes", "ring.bytes", "Its size, ring.bytes."),
    _gauge("ring_used_bytes", "ring.span_bytes", "Span from the oldest record to the newest."),
    _gauge("ring_records", "ring.num_records", "Records in it."),
    _gauge("ring_oldest_lease_seconds", "ring.oldest_lease_s", "Age of the oldest lease."),
    # --- weight updates ---
    _gauge("weight_version", "run.version", "Published weight version."),
    _counter("updates", "totals.updates", "Published weight versions of this life."),
    _counter("update_bubble_seconds", "totals.bubble_s", "Time that engines were paused for them."),
    _gauge("update_write_seconds", _last("updates", "write_s"), "The ranks' part of the last one."),
    _gauge("update_load_seconds", _last("updates", "load_s"), "The engines' part of the last one."),
    # --- the run ---
    _gauge("up_seconds", "run.uptime_s", "Age of this life of the hub."),
    _gauge("ranks", lambda now: _one(len(now.trainer.ranks)), "Attached trainer processes."),
    _counter("warnings", "totals.warnings", "Warnings of hub and generator."),
)
