"""Spans in lanes as a picture. In: spans, a stretch of time. Out: HTML.

Invariant: a lane with more spans than can be seen shows what took most of each column, and says so.
"""

from collections.abc import Sequence

from fa_rollout.account.words import seconds
from fa_rollout.report.chart import WIDTH, Axis, x_labels
from fa_rollout.report.html import escape
from fa_rollout.report.ticks import clock, time_ticks
from fa_rollout.report.timeline import Span

NAMES = {
    "train": "training",
    "wait": "waiting in next_batch",
    "start": "starting",
    "update": "weight update",
    "write": "writes weights",
    "load": "engines load",
    "bubble": "engines paused",
    "work": "up",
    "evaluation": "evaluation",
}
MAX_SPANS = 300
"""Of a lane; more are told by column."""
_NUM_COLUMNS = 500


def lane_chart(
    title: str, lanes: dict[str, list[Span]], start_s: float, end_s: float, *, zero_s: float, note: str = ""
) -> str:
    """All lanes between two times; labels count from `zero_s`."""
    length_s = max(1e-6, end_s - start_s)
    rows, kinds = [], []
    for lane, members in lanes.items():
        inside = [s for s in members if s.end_s > start_s and s.start_s < end_s]
        shown = inside if len(inside) <= MAX_SPANS else _by_column(inside, start_s, length_s)
        kinds += [span.kind for span in shown]
        rows.append(_row(lane, shown, start_s, length_s))
        if shown is not inside:
            note = note or "each column shows what took most of it"
    legend = "".join(
        f'<li><i class="fill {kind}"></i>{escape(name)}</li>' for kind, name in NAMES.items() if kind in kinds
    )
    offset_s = start_s - zero_s
    labels = [(t / length_s, clock(offset_s + t, length_s)) for t in _round_ticks(offset_s, length_s)]
    axis = Axis(name="since the launch", labels=labels, points=())
    shown_note = f" <span>{escape(note)}</span>" if note else ""
    return (
        f'<figure class="chart"><figcaption><b>{escape(title)}</b>{shown_note}</figcaption>'
        f'<ul class="legend">{legend}</ul>'
        f'<div class="lanes">{"".join(rows)}<div class="plot bare">{x_labels(axis)}</div></div></figure>'
    )


def _round_ticks(offset_s: float, length_s: float) -> list[float]:
    """Round times on the run's own clock, as places after the start of the picture."""
    found = time_ticks(length_s)
    step = found[1] - found[0] if len(found) > 1 else length_s
    first = -(-offset_s // step) * step - offset_s
    return [first + index * step for index in range(len(found)) if first + index * step <= length_s]


def _row(lane: str, members: Sequence[Span], start_s: float, length_s: float) -> str:
    marks = []
    for span in members:
        x = max(0.0, (span.start_s - start_s) / length_s) * WIDTH
        width = min(WIDTH, (span.end_s - start_s) / length_s * WIDTH) - x
        text = f"{span.name}: {seconds(span.duration_s)}"
        marks.append(
            f'<rect class="fill {span.kind}" x="{x:.2f}" width="{max(width, 0.4):.2f}" height="100" '
            f'data-t="{escape(text)}"/>'
        )
    label = f"{lane}: {len(members)} spans"
    return (
        f'<div class="lane"><span>{escape(lane)}</span><svg viewBox="0 0 {WIDTH:.0f} 100" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(label)}">{"".join(marks)}</svg></div>'
    )


def _by_column(members: Sequence[Span], start_s: float, length_s: float) -> list[Span]:
    """What took most of each column, neighbours of one kind as one."""
    width_s = length_s / _NUM_COLUMNS
    spent: list[dict[str, float]] = [{} for _ in range(_NUM_COLUMNS)]
    for span in members:
        first = max(0, int((span.start_s - start_s) / width_s))
        last = min(_NUM_COLUMNS - 1, int((span.end_s - start_s) / width_s))
        for column in range(first, last + 1):
            low = start_s + column * width_s
            share = min(span.end_s, low + width_s) - max(span.start_s, low)
            spent[column][span.kind] = spent[column].get(span.kind, 0.0) + max(0.0, share)
    found: list[Span] = []
    for column, kinds in enumerate(spent):
        if not kinds:
            continue
        kind = max(kinds, key=lambda name: kinds[name])
        low = start_s + column * width_s
        if found and found[-1].kind == kind and found[-1].end_s >= low - width_s / 2:
            low = found.pop().start_s
        end_s = start_s + (column + 1) * width_s
        name = f"mostly {NAMES[kind]}"
        found.append(Span(lane=members[0].lane, kind=kind, name=name, start_s=low, end_s=end_s))
    return found
