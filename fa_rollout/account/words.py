"""Figures as people read them, wherever they are shown. Numbers in, short text out."""

from fa_rollout.account.snapshot import Snapshot

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
_THOUSANDS = ("", "k", "M", "G", "T")


def seconds(value: float) -> str:
    """`31 ms`, `1.2 s`, `47 s`, `12m 03s`, `5h 07m`, `3d 04h`."""
    if value < 0.0995:
        return f"{1000 * value:.0f} ms"
    if value < 9.95:
        return f"{value:.1f} s"
    if value < 99.5:
        return f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}m" if hours < 48 else f"{hours // 24}d {hours % 24:02}h"


def size(num_bytes: float) -> str:
    """`2.5 MiB`."""
    unit = 0
    while num_bytes >= 1023.95 and unit < len(_SIZES) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.0f} {_SIZES[unit]}" if unit == 0 else f"{num_bytes:.1f} {_SIZES[unit]}"


def share(value: float | None) -> str:
    """`34%`, or `-` if unknown."""
    return "-" if value is None else f"{value:.0%}"


def number(value: float) -> str:
    """Three significant digits, all digits below 10,000: `0.123`, `12.3`, `1,234`, `56.7k`, `8.9M`."""
    if abs(value) < 9999.5 and (value == int(value) or abs(value) >= 999.5):
        return f"{value:,.0f}"
    unit = 0
    while abs(value) >= 999.5 and unit < len(_THOUSANDS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    text = f"{value:.{digits}f}" if abs(value) >= 0.9995 or not value else f"{value:.3g}"
    text = text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
    return f"{text}{_THOUSANDS[unit]}"


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
