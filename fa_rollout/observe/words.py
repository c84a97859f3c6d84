"""Figures as people read them. Numbers in, short text out."""

from fa_rollout.observe.snapshot import Snapshot

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def seconds(value: float) -> str:
    """`31 ms`, `1.2 s`, `47 s`, `12m 03s`, `5h 07m`, `3d 04h`."""
    if value < 10:
        return f"{1000 * value:.0f} ms" if value < 0.1 else f"{value:.1f} s"
    if value < 100:
        return f"{value:.0f} s"
    minutes, rest = divmod(int(value), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}m" if hours < 48 else f"{hours // 24}d {hours % 24:02}h"


def size(num_bytes: float) -> str:
    """`2.5 MiB`."""
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.0f} {_UNITS[unit]}" if unit == 0 else f"{num_bytes:.1f} {_UNITS[unit]}"


def share(value: float | None) -> str:
    """`34%`, or `-` where nothing is known."""
    return "-" if value is None else f"{value:.0%}"


def number(value: float) -> str:
    """`1,920`, and `3.4M` from a million on."""
    if value >= 1e9:
        return f"{value / 1e9:.1f}G"
    return f"{value / 1e6:.1f}M" if value >= 1e6 else f"{value:,.0f}"


def maybe(value: float | None) -> str:
    """A number, or `-`."""
    return "-" if value is None else f"{value:g}"


def progress_line(snapshot: Snapshot) -> str:
    """A run's state in one line, for logs."""
    run, ring = snapshot.run, snapshot.ring
    words = [f"step {run.num_trained}/{run.num_steps}"]
    if snapshot.steps:
        last = snapshot.steps[-1]
        words += [f"reward={last.reward_mean:.3f}", f"step_s={last.spent.total_s:.2f}"]
        words += [f"staleness={maybe(last.staleness_max)}"]
    words += [
        f"tokens/s={snapshot.generator.tokens_per_s:.0f}",
        f"idle={share(snapshot.trainer.recent.idle)}",
        f"ring={share(ring.span_bytes / max(1, ring.bytes))}",
    ]
    return " ".join(words)
