"""Charts as inline SVG that keeps its lines thin and its text readable at any width.

In: numbers. Out: HTML. The marks are drawn in a box of 1000 x 100 that is stretched to the page; axes are
text around it. Invariant: every chart says its numbers in its label too, for those who do not see it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from fa_rollout.account.words import number
from fa_rollout.report.html import escape
from fa_rollout.report.ticks import ticks

WIDTH, HEIGHT = 1000.0, 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart; None leaves a gap."""

    name: str
    values: Sequence[float | None]
    colour: str
    """Name of a colour of the page's style."""
    style: str = "line"
    """line, faint, area or dots; columns do not mind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Labels along the bottom: (place from 0 to 1, text)."""

    name: str
    labels: Sequence[tuple[float, str]]
    points: Sequence[str]
    """What each point, or column, is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A line across, such as a bound."""

    value: float
    name: str


def lines(
    title: str,
    found: Sequence[Line],
    axis: Axis,
    *,
    note: str = "",
    low: float = 0.0,
    high: float | None = None,
    limit: Limit | None = None,
) -> str:
    """A chart of lines over a common axis."""
    top = _top([v for line in found for v in line.values if v is not None], high, limit)
    marks = "".join(_line(line, low, top) for line in found)
    return _figure(title, found, axis, note, low, top, marks + _limit(limit, low, top), limit, is_points=True)


def columns(
    title: str,
    found: Sequence[Line],
    axis: Axis,
    *,
    note: str = "",
    high: float | None = None,
    limit: Limit | None = None,
) -> str:
    """Columns, the lines' values stacked in each."""
    count = max((len(line.values) for line in found), default=0)
    sums = [sum(line.values[i] or 0.0 for line in found) for i in range(count)]
    top = _top(sums, high, limit)
    gap = 0.12 if count <= 80 else 0.0
    marks, below = [], [0.0] * count
    for line in found:
        rectangles = []
        for index, value in enumerate(line.values):
            if not value:
                continue
            x = (index + gap / 2) / count * WIDTH
            height = value / top * HEIGHT
            y = HEIGHT - below[index] - height
            below[index] += height
            rectangles.append(f"M{x:.2f} {y:.2f}h{(1 - gap) / count * WIDTH:.2f}v{height:.2f}H{x:.2f}z")
        marks.append(f'<path class="fill {line.colour}" d="{"".join(rectangles)}"/>')
    marks.append(_limit(limit, 0.0, top))
    return _figure(title, found, axis, note, 0.0, top, "".join(marks), limit, is_points=False)


def share_bar(parts: Sequence[tuple[str, float, str]], label: str) -> str:
    """One bar of (name, share, colour), and its legend with the shares."""
    cells = "".join(
        f'<span class="fill {colour}" style="width:{share * 100:.3f}%" '
        f'data-t="{escape(name)}: {share:.1%}"></span>'
        for name, share, colour in parts
        if share > 0
    )
    legend = "".join(
        f'<li><i class="fill {colour}"></i>{escape(name)} <b>{share:.1%}</b></li>'
        for name, share, colour in parts
    )
    bar = f'<div class="share" role="img" aria-label="{escape(label)}">{cells}</div>'
    return f'{bar}<ul class="legend">{legend}</ul>'


# --- inside ----------------------------------------------------------------------------------------------


def _top(values: Sequence[float], high: float | None, limit: Limit | None) -> float:
    if high is not None:
        return high
    largest = max([*values, limit.value if limit else 0.0, 0.0])
    if largest <= 0:
        return 1.0
    over = ticks(0.0, largest * 1.3, 4)
    return next((tick for tick in over if tick >= largest * 1.02), largest * 1.1)


def _y(value: float, low: float, top: float) -> float:
    return HEIGHT - (min(max(value, low), top) - low) / (top - low) * HEIGHT


def _line(line: Line, low: float, top: float) -> str:
    count = len(line.values)
    pieces: list[list[tuple[float, float]]] = [[]]
    for index, value in enumerate(line.values):
        if value is None:
            pieces.append([])
        else:
            x = WIDTH / 2 if count == 1 else index / (count - 1) * WIDTH
            pieces[-1].append((x, _y(value, low, top)))
    drawn = []
    for piece in filter(None, pieces):
        path = "M" + "L".join(f"{x:.1f} {y:.2f}" for x, y in piece)
        if line.style == "area":
            base = f"L{piece[-1][0]:.1f} {HEIGHT}L{piece[0][0]:.1f} {HEIGHT}z"
            drawn.append(f'<path class="under {line.colour}" d="{path}{base}"/>')
        if line.style == "dots" or len(piece) == 1:
            dots = "".join(f"M{x:.1f} {y:.2f}h0" for x, y in piece)
            drawn.append(f'<path class="dots {line.colour}" d="{dots}"/>')
        else:
            drawn.append(
                f'<path class="{"faint" if line.style == "faint" else "line"} {line.colour}" d="{path}"/>'
            )
    return "".join(drawn)


def _limit(limit: Limit | None, low: float, top: float) -> str:
    if limit is None:
        return ""
    return f'<path class="limit" d="M0 {_y(limit.value, low, top):.2f}H{WIDTH:.0f}"/>'


def _figure(
    title: str,
    found: Sequence[Line],
    axis: Axis,
    note: str,
    low: float,
    top: float,
    marks: str,
    limit: Limit | None,
    *,
    is_points: bool,
) -> str:
    grid = ticks(low, top, 4)
    rules = "".join(f'<path class="grid" d="M0 {_y(v, low, top):.2f}H{WIDTH:.0f}"/>' for v in grid)
    ys = "".join(f'<span style="bottom:{100 - _y(v, low, top):.2f}%">{number(v)}</span>' for v in grid)
    tip = {
        "points": list(axis.points),
        "between": is_points,
        "lines": [
            {"name": line.name, "colour": line.colour, "values": [_short(v) for v in line.values]}
            for line in found
        ],
    }
    return (
        f'<figure class="chart"><figcaption><b>{escape(title)}</b>{_note(note)}</figcaption>'
        f"{_legend(found, limit, is_points=is_points)}"
        f'<div class="plot"><div class="ys" aria-hidden="true">{ys}</div>'
        f"<div class=\"area\" data-tip='{escape(json.dumps(tip))}'>"
        f"{_svg(rules + marks, _label(title, found))}</div>{x_labels(axis)}</div></figure>"
    )


def _svg(marks: str, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{marks}</svg>'
    )


def x_labels(axis: Axis) -> str:
    """Text below a chart."""
    texts = "".join(
        f'<span style="left:{place * 100:.2f}%">{escape(text)}</span>' for place, text in axis.labels
    )
    return f'<div class="xs" aria-hidden="true">{texts}</div><div class="axis">{escape(axis.name)}</div>'


def _note(note: str) -> str:
    return f" <span>{escape(note)}</span>" if note else ""


def _legend(found: Sequence[Line], limit: Limit | None, *, is_points: bool) -> str:
    entries = [
        f'<li><i class="{line.style if is_points else ""} fill {line.colour}"></i>{escape(line.name)}</li>'
        for line in found
    ]
    if limit is not None:
        entries.append(f'<li><i class="limit"></i>{escape(limit.name)}</li>')
    return f'<ul class="legend">{"".join(entries)}</ul>' if len(entries) > 1 else ""


def _label(title: str, found: Sequence[Line]) -> str:
    told = []
    for line in found:
        values = [v for v in line.values if v is not None]
        if values:
            told.append(f"{line.name} from {number(values[0])} to {number(values[-1])}, ")
            told[-1] += f"least {number(min(values))}, most {number(max(values))}"
    return f"{title}: {'; '.join(told)}"


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
