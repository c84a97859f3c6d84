"""The report's pictures, each from the figures that it needs. In: a summary. Out: HTML."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from fa_rollout.account.figures import StepFigures
from fa_rollout.account.words import number, size
from fa_rollout.records.history import History
from fa_rollout.report import figures
from fa_rollout.report.chart import Axis, Limit, Line, columns, lines, share_bar
from fa_rollout.report.lane_chart import lane_chart
from fa_rollout.report.summary import Summary
from fa_rollout.report.ticks import clock, ticks, time_ticks
from fa_rollout.report.timeline import lanes, spans

MAX_COLUMNS = 160
SMOOTHED_OVER = 10
MAX_RANK_LANES = 8
_CLOSE_UP_STEPS = 6
_PHASES = (
    ("training", "training", "train"),
    ("waiting", "waiting for data", "wait"),
    ("waiting_for_ranks", "waiting for the slowest rank", "ranks"),
    ("updating", "weight updates", "update"),
    ("outside", "its own code", "other"),
)
"""(field of TimeSpent, name, colour) in the order of the pictures."""


def where_time_went(summary: Summary) -> str:
    """One bar of the whole run, and one a step."""
    spent, steps = summary.spent, summary.steps
    parts = [(name, getattr(spent, field) / spent.total_s, colour) for field, name, colour in _PHASES]
    bar = share_bar(parts, "Where the trainer's time went")
    found = [
        Line(name=name, values=_bins([getattr(step.spent, field) for step in steps]), colour=colour)
        for field, name, colour in _PHASES
    ]
    if not steps:
        return bar
    note = "seconds, from the end of the step before; start-up is left out"
    return bar + columns("Each step", found, _step_axis(steps, is_columns=True), note=note)


def timeline(summary: Summary) -> str:
    """The whole run, and the steps around the longest wait."""
    history = summary.history
    by_lane = lanes(spans(history))
    ranks = [lane for lane in by_lane if lane.startswith("rank")]
    for lane in ranks[MAX_RANK_LANES:]:
        del by_lane[lane]
    note = f"the first {MAX_RANK_LANES} of {len(ranks)} ranks" if len(ranks) > MAX_RANK_LANES else ""
    whole = lane_chart(
        "The whole run", by_lane, history.began_s, history.last_s, zero_s=history.began_s, note=note
    )
    steps = summary.steps
    if len(steps) <= _CLOSE_UP_STEPS + 2:
        return whole
    slowest = max(range(1, len(steps)), key=lambda index: steps[index].spent.total_s)
    first = max(0, min(slowest - 2, len(steps) - _CLOSE_UP_STEPS))
    chosen = steps[first : first + _CLOSE_UP_STEPS]
    start_s, end_s = _trained_s(history, chosen[0]) - chosen[0].spent.total_s, _trained_s(history, chosen[-1])
    title = f"A closer look: steps {chosen[0].step} to {chosen[-1].step}, around the longest"
    return whole + lane_chart(title, by_lane, start_s, end_s, zero_s=history.began_s)


def _trained_s(history: History, step: StepFigures) -> float:
    return history.steps[step.step].trained_s or history.last_s


def reward(summary: Summary) -> str:
    """Mean reward by step."""
    steps = summary.steps
    if not steps:
        return ""
    values = [step.reward_mean for step in steps]
    smooth = [fmean(values[max(0, i + 1 - SMOOTHED_OVER) : i + 1]) for i in range(len(values))]
    found = [
        Line(name="mean of a step", values=_bins(values), colour="train", style="faint"),
        Line(name=f"mean of {SMOOTHED_OVER} steps", values=_bins(smooth), colour="train"),
    ]
    low, high = min(0.0, min(values)), max(values)
    top = 1.0 if 0.5 < high <= 1.0 else None
    return lines("Reward", found, _step_axis(steps), low=low, high=top)


def staleness(summary: Summary) -> str:
    """By step, and how often each age was trained."""
    steps = [s for s in summary.steps if s.staleness_max is not None]
    if not steps:
        return ""
    limit = Limit(value=float(summary.staleness), name=f"limit {summary.staleness}")
    found = [
        Line(
            name="stalest sample of a step",
            values=_bins([_plain(s.staleness_max) for s in steps]),
            colour="wait",
        ),
        Line(name="mean", values=_bins([_plain(s.staleness_mean) for s in steps]), colour="update"),
    ]
    over_steps = lines("Staleness", found, _step_axis(steps), note="versions", limit=limit)
    ages: dict[int, int] = {}
    for group in figures.trained_groups(summary.history):
        if group.staleness is not None:
            ages[group.staleness] = ages.get(group.staleness, 0) + len(group.rewards)
    top = max(ages, default=0)
    axis = Axis(
        name="versions old when trained",
        labels=[((age + 0.5) / (top + 1), str(age)) for age in range(top + 1)],
        points=[f"{age} versions old" for age in range(top + 1)],
    )
    counts = Line(name="samples", values=[float(ages.get(age, 0)) for age in range(top + 1)], colour="wait")
    return over_steps + columns("How stale samples were", [counts], axis, note="samples trained")


def lengths(summary: Summary) -> str:
    """Of answers that steps took."""
    found = [n for group in figures.trained_groups(summary.history) for n in group.response_lens]
    if not found:
        return ""
    marks = ticks(0.0, max(found) + 1.0, 24)
    width = marks[1] - marks[0] if len(marks) > 1 else 1.0
    width = max(1.0, width)
    count = int(max(found) / width) + 1
    values = [0.0] * count
    for length in found:
        values[int(length / width)] += 1
    axis = Axis(
        name="response tokens",
        labels=[
            ((t + (0.5 if width == 1 else 0.0)) / (count * width), number(t))
            for t in ticks(0.0, (count - 1) * width, 5)
        ],
        points=[f"{i * width:.0f} to {(i + 1) * width - 1:.0f} tokens" for i in range(count)],
    )
    line = Line(name="samples", values=values, colour="train")
    return columns("How long answers were", [line], axis, note="samples trained")


def flow(summary: Summary) -> str:
    """What was in flight, in the ring, and what came of it, over time."""
    over, history = summary.over, summary.history
    length_s = history.last_s - history.began_s
    axis = Axis(
        name="since the launch",
        labels=[(t / length_s, clock(t, length_s)) for t in time_ticks(length_s)] if length_s > 0 else [],
        points=[clock((i + 0.5) * over.width_s, length_s) for i in range(len(over.running))],
    )
    room = figures.capacity(history)
    limit = (
        Limit(value=float(room), name=f"{room} slots at the engines")
        if 0 < room < 4 * max(over.running)
        else None
    )
    running = [Line(name="samples", values=over.running, colour="train", style="area")]
    tokens = [Line(name="tokens/s", values=over.tokens_per_s, colour="evaluation", style="area")]
    ring_size = float((history.config.get("ring") or {}).get("bytes", 0)) or None
    ring = [
        Line(
            name="percent of the ring",
            values=_percent(over.ring_bytes, ring_size),
            colour="update",
            style="area",
        )
    ]
    ready = [Line(name="groups", values=over.ready, colour="wait", style="area")]
    note = f"of {size(ring_size)}" if ring_size else ""
    return (
        lines("Samples in progress", running, axis, limit=limit, note="of groups that have started")
        + lines("Tokens per second", tokens, axis, note="of groups as they were completed")
        + lines("Groups ready for the trainer", ready, axis)
        + lines("Ring fill", ring, axis, note=f"percent {note}")
    )


def _percent(values: Sequence[float], whole: float | None) -> list[float | None]:
    return [None if not whole else 100.0 * value / whole for value in values]


def _plain(value: float | None) -> float:
    return 0.0 if value is None else float(value)


def _bins(values: Sequence[float]) -> list[float]:
    """Means of at most `MAX_COLUMNS` equal stretches."""
    count = min(MAX_COLUMNS, len(values))
    bounds = [index * len(values) // count for index in range(count + 1)] if count else [0]
    return [fmean(values[a:b]) for a, b in pairwise(bounds)]


def _step_axis(steps: Sequence[StepFigures], *, is_columns: bool = False) -> Axis:
    count = min(MAX_COLUMNS, len(steps))
    bounds = [index * len(steps) // count for index in range(count + 1)] if count else [0]
    points = [
        f"step {steps[a].step}" if b - a == 1 else f"steps {steps[a].step} to {steps[b - 1].step}"
        for a, b in pairwise(bounds)
    ]
    first, last = steps[0].step, steps[-1].step
    half, width = (0.5, last - first + 1) if is_columns else (0.0, max(1, last - first))
    labels = [((t - first + half) / width, f"{t:.0f}") for t in ticks(first, last, 5) if t == int(t)]
    return Axis(name="step", labels=labels, points=points)
