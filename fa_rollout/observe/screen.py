"""A snapshot on a terminal's screen: sections of lines, cut to the height and width there is.

In: a snapshot, the steps of the last while, a size. Out: a text of lines that fit. Invariant: the first lines
say what to know at a glance, at any size; the verdict alone may wrap.
"""

from collections.abc import Sequence

from rich.text import Text

from fa_rollout.account.figures import StepFigures
from fa_rollout.account.snapshot import Snapshot
from fa_rollout.account.verdict import judge
from fa_rollout.observe import rows
from fa_rollout.observe.glyphs import Glyphs
from fa_rollout.observe.rows import Line
from trainer_hook.printable import printable

LABEL = 11
WIDE = 150
"""Columns from which on there are two of them."""
GAP = 3
MAX_CHART = 18
"""Lines of curves at the end, where there is room."""
MAX_COLUMNS = 200


Sections = dict[str, list[Line]]
"""Lines under their labels; where there is little room the last ones of each give way."""


def draw(
    now: Snapshot,
    steps: Sequence[StepFigures],
    *,
    width: int,
    height: int,
    glyphs: Glyphs,
    note: str = "",
    looks: Sequence[Snapshot] = (),
    is_over: bool = False,
) -> Text:
    """The whole screen; of a run that is over, without what was under way.

    Args:
        note: ends the first line.
        looks: the latest snapshots, which the verdict rests on.
    """
    head = [*_printable(rows.head(now, judge(now, looks), glyphs, width, height, note)), []]
    room = max(1, height - len(head))
    left, right = _columns(now, steps, glyphs)
    if is_over:
        left, right = left | {"lost": right["lost"], "warnings": right["warnings"]}, {}
    if width < WIDE:
        body = [_labelled(entry) for entry in _fit(left | right, room)]
    else:
        half = (width - GAP) // 2
        body = _side_by_side(_fit(left, room), _fit(right, room), half, glyphs)
    charts = rows.charts(steps, glyphs, min(width, MAX_COLUMNS), min(MAX_CHART, room - len(body) - 1))
    return _text([*head, *body, *([[], *charts] if charts else [])], width, height, glyphs)


def _columns(now: Snapshot, steps: Sequence[StepFigures], glyphs: Glyphs) -> tuple[Sections, Sections]:
    left = {
        "trainer": rows.trainer(now, glyphs),
        "ranks": rows.ranks(now),
        "steps": rows.steps(now, steps, glyphs),
        "staleness": rows.staleness(now, steps, glyphs),
        "groups": rows.groups(now),
        "ring": rows.ring(now, glyphs),
        "updates": rows.updates(now),
    }
    right = {
        "engines": rows.engines(now, glyphs),
        "waits": rows.waits(now),
        "slowest": rows.slowest(now),
        "lost": rows.lost(now),
        "warnings": rows.warnings(now),
    }
    return _all_printable(left), _all_printable(right)


def _all_printable(sections: Sections) -> Sections:
    return {label: _printable(lines) for label, lines in sections.items()}


def _printable(lines: list[Line]) -> list[Line]:
    """Before anything is measured: engines and user code wrote parts of it."""
    return [[(printable(words), style) for words, style in line] for line in lines]


def _fit(sections: Sections, room: int) -> list[tuple[str, Line]]:
    """Each section's first line, then further ones in turn as long as there is room."""
    shown = {label: min(1, len(lines)) for label, lines in sections.items()}
    left = room - sum(shown.values())
    while left > 0:
        growing = [label for label, lines in sections.items() if shown[label] < len(lines)]
        if not growing:
            break
        for label in growing[:left]:
            shown[label] += 1
        left -= len(growing[:left])
    fitted: list[tuple[str, Line]] = []
    for label, lines in sections.items():
        rest = len(lines) - shown[label]
        for number, line in enumerate(lines[: shown[label]]):
            more: Line = [(f"  (+{rest})", "dim")] if rest and number == shown[label] - 1 else []
            fitted.append((label if number == 0 else "", [*line, *more]))
    return fitted[:room]


def _labelled(entry: tuple[str, Line]) -> Line:
    label, line = entry
    return [(f"{label:<{LABEL}}", "bold"), *line]


def _side_by_side(
    left: list[tuple[str, Line]], right: list[tuple[str, Line]], half: int, glyphs: Glyphs
) -> list[Line]:
    lines: list[Line] = []
    for index in range(max(len(left), len(right))):
        line = _cut(_labelled(left[index]), half, glyphs) if index < len(left) else []
        used = sum(len(text) for text, _ in line)
        gap = " " * (half - used + GAP)
        lines.append([*line, (gap, ""), *(_labelled(right[index]) if index < len(right) else [])])
    return lines


def _text(lines: list[Line], width: int, height: int, glyphs: Glyphs) -> Text:
    text = Text(no_wrap=True, overflow="crop")
    for number, line in enumerate(lines[:height]):
        if number:
            text.append("\n")
        for words, style in _cut(line, width, glyphs):
            text.append(words, style=style or None)
    return text


def _cut(line: Line, width: int, glyphs: Glyphs) -> Line:
    """The line in at most `width` characters."""
    if sum(len(words) for words, _ in line) <= width:
        return line
    end = "~" if glyphs.is_ascii else "…"
    cut: Line = []
    room = width - 1
    for words, style in line:
        cut.append((words[:room], style))
        room -= len(words[:room])
        if room <= 0:
            break
    return [*cut, (end, "dim")]
