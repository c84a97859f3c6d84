"""Bars and curves of characters, in Unicode's blocks or in plain ASCII."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """What a terminal can show."""

    levels: str
    """From low to high."""
    full: str
    empty: str
    dot: str
    line: str
    is_ascii: bool

    def bar(self, share: float, width: int) -> str:
        """A filled part of `width` characters."""
        num_full = round(min(1.0, max(0.0, share)) * width)
        return self.full * num_full + self.empty * (width - num_full)

    def curve(self, values: Sequence[float], width: int) -> str:
        """One character a value, from the lowest to the highest of them; means where there are more."""
        if not values or width < 1:
            return ""
        points = _thinned(values, width)
        low, high = min(points), max(points)
        if high <= low:
            return self.levels[len(self.levels) // 2] * len(points)
        top = len(self.levels) - 1
        return "".join(self.levels[round((value - low) / (high - low) * top)] for value in points)

    def chart(
        self, values: Sequence[float], width: int, height: int, *, low: float | None, high: float | None
    ) -> list[str]:
        """Columns over `height` lines, the top one first; limits that are None are the values' own."""
        points = _spread(values, width)
        low = min(points) if low is None else low
        high = max(points) if high is None else high
        steps, lines = len(self.levels), []
        filled = [
            round((point - low) / max(1e-12, high - low) * (height * steps - 1)) + 1 for point in points
        ]
        for line in reversed(range(height)):
            parts = [min(steps, max(0, level - line * steps)) for level in filled]
            lines.append("".join(self.levels[part - 1] if part else " " for part in parts))
        return lines


UNICODE = Glyphs(levels="▁▂▃▄▅▆▇█", full="█", empty="░", dot="●", line="─", is_ascii=False)
ASCII = Glyphs(levels="_.-~=+*#", full="#", empty=".", dot="*", line="-", is_ascii=True)


def glyphs_for(encoding: str) -> Glyphs:
    """Those that text in this encoding can carry."""
    try:
        (UNICODE.levels + UNICODE.empty + UNICODE.dot).encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return ASCII
    return UNICODE


def _spread(values: Sequence[float], width: int) -> list[float]:
    """Exactly `width` of them."""
    points = _thinned(values, width)
    return [points[index * len(points) // width] for index in range(width)]


def _thinned(values: Sequence[float], width: int) -> list[float]:
    count = len(values)
    if count <= width:
        return list(values)
    cuts = [index * count // width for index in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
