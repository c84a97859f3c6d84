"""Lengths of answers, drawn from a model or read from a trace; reproducible by seed and order of arrival."""

import random
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

from tests.kit.scripted.script import Lengths


def length_source(lengths: Lengths) -> Callable[[], int]:
    """A function that gives the length of the next answer, at least 1."""
    if lengths.kind == "fixed":
        return lambda: max(1, lengths.tokens)
    if lengths.kind == "list":
        values = cycle(_values(lengths))
        return lambda: next(values)
    draw = random.Random(lengths.seed)
    if lengths.kind == "uniform":
        return lambda: draw.randint(max(1, lengths.low), lengths.high)
    return lambda: _clip(lengths.tokens * draw.lognormvariate(0.0, lengths.sigma), lengths)


def _clip(value: float, lengths: Lengths) -> int:
    return int(min(max(value, lengths.low, 1), lengths.high))


def _values(lengths: Lengths) -> list[int]:
    values = lengths.values
    if lengths.path is not None:
        values = [int(line) for line in Path(lengths.path).read_text().split()]
    if not values or min(values) < 1:
        raise ValueError(f"a list of lengths must hold whole numbers from 1 on, found {values[:8]}")
    return values
