"""How much of what an engine can do it does: from its answers' speed beside few and beside many others. Pure.

In: paces, which the client measures. Out: tokens per second, now and at most. Rule: with n requests in the
engine the time per token of one of them is about a + b n, so the engine makes n / (a + b n) tokens a second.
Where answers slow down in proportion to their number, more requests gain nothing.
"""

from collections.abc import Sequence

from trainer_hook.messages import EngineFigures, Pace

LEAST_TOKENS = 2000
"""Below this many tokens nothing is told."""
LEAST_SPREAD = 1.1
"""Loads that differ by less than this factor do not tell how speed falls with load."""


def engine_rates(engine: EngineFigures) -> tuple[float, float] | None:
    """(tokens per second now, the most it could make); None where its paces do not tell."""
    line = speed_line(engine.paces)
    if line is None:
        return None
    base_s, each_s = line
    slots = max(engine.allowed, engine.in_flight, 1)
    most = slots / (base_s + each_s * slots)
    return min(most, engine.in_flight / (base_s + each_s * max(1, engine.in_flight))), most


def speed_line(paces: Sequence[Pace]) -> tuple[float, float] | None:
    """(a, b) of the time per token a + b n, through the lower and the upper half of the loads seen."""
    total = sum(pace.tokens for pace in paces)
    if total < LEAST_TOKENS:
        return None
    low, high = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    passed = 0.0
    for pace in sorted(paces, key=lambda pace: pace.beside / pace.tokens):
        half = low if passed + pace.tokens / 2 < total / 2 else high
        passed += pace.tokens
        for index, value in enumerate((pace.tokens, pace.beside, pace.spent_s)):
            half[index] += value
    if not low[0] or not high[0]:
        return None
    few, many = low[1] / low[0], high[1] / high[0]
    if many < LEAST_SPREAD * few:
        return None
    slow, fast = high[2] / high[0], low[2] / low[0]
    each_s = min(max(0.0, (slow - fast) / (many - few)), slow / many)
    return slow - each_s * many, each_s
