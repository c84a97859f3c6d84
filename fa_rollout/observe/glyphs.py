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


UNICODE = Glyphs(levels="▁▂▃▄▅▆▇█", full="█", empty="░", dot="●", line="─", is_ascii=False)
ASCII = Glyphs(levels="_.-~=+*#", full="#", empty=".", dot="*", line="-", is_ascii=True)


def glyphs_for(encoding: str) -> Glyphs:
    """Those that text in this encoding can carry."""
    try:
        (UNICODE.levels + UNICODE.empty + UNICODE.dot).encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return ASCII
    return UNICODE


def _thinned(values: Sequence[float], width: int) -> list[float]:
    count = len(values)
    if count <= width:
        return list(values)
    cuts = [index * count // width for index in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
