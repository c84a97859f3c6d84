"""What was measured, by contender, size and form; medians and ratios of it."""

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median, quantiles

from benchmarks.transport.pair import Memory, Throughput
from benchmarks.transport.workload import SIZES, Form

_BYTES = {size.name: size.num_bytes for size in SIZES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What a figure is of."""

    contender: str
    size: str
    form: Form


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Medians over the passes."""

    groups_per_s: float
    gb_per_s: float
    of_memcpy: float
    """Speed relative to plain copies measured in the same producer just before."""
    producer_us: float
    """CPU microseconds a group."""
    consumer_us: float
    helper_us: float
    cpu_s_per_gb: float
    """Of all processes."""
    p50_us: float | None
    p99_us: float | None


@dataclass(slots=True, kw_only=True)
class Results:
    """All of a run."""

    throughput: dict[Key, list[Throughput]] = field(default_factory=lambda: defaultdict(list))
    delays_us: dict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))
    idle: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Share of a CPU of producer, consumer and helper while nothing is sent."""
    memory: dict[str, tuple[Memory, Memory]] = field(default_factory=dict)
    touch_us: dict[tuple[str, Form], float] = field(default_factory=dict)
    """(Size, form) -> CPU microseconds of the trainer's own part, which no transport can save."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Contender -> why it is missing."""
    load_average: float = 0.0

    def rate(self, key: Key) -> float | None:
        """Groups a second as far as known."""
        known = self.throughput.get(key)
        return None if not known else median(run.groups_per_s for run in known)

    def figures(self, key: Key) -> Figures | None:
        """Medians of one row; None where nothing was measured."""
        runs = self.throughput.get(key)
        if not runs:
            return None
        rate = median(run.groups_per_s for run in runs)
        num_bytes = _BYTES[key.size]
        cpu = {
            name: median(getattr(run, f"{name}_cpu_s") / run.num_groups for run in runs)
            for name in ("producer", "consumer", "helper")
        }
        delays = self.delays_us.get(key) or []
        return Figures(
            groups_per_s=rate,
            gb_per_s=rate * num_bytes / 1e9,
            of_memcpy=median(run.groups_per_s * run.memcpy_s for run in runs),
            producer_us=cpu["producer"] * 1e6,
            consumer_us=cpu["consumer"] * 1e6,
            helper_us=cpu["helper"] * 1e6,
            cpu_s_per_gb=sum(cpu.values()) / num_bytes * 1e9,
            p50_us=median(delays) if delays else None,
            p99_us=quantiles(delays, n=100)[98] if len(delays) > 1 else None,
        )

    def ratio(self, key: Key, other: Key) -> float | None:
        """How many times as fast, as the median of the passes' own ratios."""
        pairs = list(zip(self.throughput.get(key, []), self.throughput.get(other, []), strict=False))
        return median(a.groups_per_s / b.groups_per_s for a, b in pairs) if pairs else None
