"""Where the labels of an axis stand, and clock times along it. Pure."""

import math


def clock(value: float, span_s: float) -> str:
    """A place on a time axis of this length."""
    if span_s < 120:
        return f"{value:.3g} s"
    if span_s < 2 * 3600:
        return f"{int(value) // 60}:{int(value) % 60:02d}"
    return f"{int(value) // 3600}:{int(value) % 3600 // 60:02d} h"


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round values from `low` to `high`."""
    if high <= low:
        return [low]
    raw = (high - low) / wanted
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, int(high / step + 1e-9) + 1)]


def time_ticks(span_s: float, wanted: int = 5) -> list[float]:
    """Round times from 0 on."""
    steps: tuple[float, ...] = (
        0.01,
        0.02,
        0.05,
        0.1,
        0.2,
        0.5,
        1,
        2,
        5,
        10,
        15,
        30,
        60,
        120,
        300,
        600,
        900,
        1800,
        3600,
    )
    steps += (7200, 4 * 3600, 6 * 3600, 12 * 3600, 86400, 2 * 86400)
    step = next((step for step in steps if span_s / step <= wanted), steps[-1])
    return [index * step for index in range(int(span_s / step) + 1)]
