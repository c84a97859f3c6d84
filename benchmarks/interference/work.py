"""The trainer's own work, and its times."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.interference.load import STEP_S

WORK_SHARE = 0.6
"""Of a step, spent with work when nothing disturbs it."""
WARM_UP = 2
"""Steps that are not counted."""
_UNIT_ROUNDS = 400
_NUM_CALIBRATING = 60


def unit(array: Any) -> float:
    """Some milliseconds of what a training loop does between kernels: small numpy calls and plain Python."""
    total, seen = 0.0, {}
    for place in range(_UNIT_ROUNDS):
        row = array[place % len(array)]
        total += float(np.dot(row, row)) * 0.5 + place
        seen[place & 63] = total
    return total


@dataclass(slots=True)
class Clocked:
    """Times of all units of work that counted."""

    wall_s: list[float]
    cpu_s: list[float]
    handing_s: list[float]
    """Of each step: from having its samples to tensors in hand."""


def train(num_units: int, num_steps: int, take: Callable[[], float]) -> Clocked:
    """`take` gives a batch, and the seconds that its handing over cost this thread."""
    array = np.ones((64, 256), np.float32)
    seen = Clocked([], [], [])
    for step in range(num_steps):
        handing_s = take()
        if step >= WARM_UP:
            seen.handing_s.append(handing_s)
        for _ in range(num_units):
            began_s, cpu_s = time.perf_counter(), time.thread_time()
            unit(array)
            if step >= WARM_UP:
                seen.wall_s.append(time.perf_counter() - began_s)
                seen.cpu_s.append(time.thread_time() - cpu_s)
    return seen


def calibrated() -> int:
    """Units that make up a step's work on this machine."""
    array = np.ones((64, 256), np.float32)
    times = []
    for _ in range(_NUM_CALIBRATING):
        began_s = time.perf_counter()
        unit(array)
        times.append(time.perf_counter() - began_s)
    return max(1, round(STEP_S * WORK_SHARE / statistics.median(times)))
