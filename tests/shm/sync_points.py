"""Where the marked publish and observe points of `shm` are, read from its sources."""

import re
import socket
from dataclasses import dataclass
from pathlib import Path

import shm

_MARK = re.compile(r"# SYNC POINT ([a-z-]+): .*\(pairs with ([a-z-]+)\)")
_ANY = re.compile(r"SYNC POINT [a-z-]+:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A mark, and the line that follows it."""

    name: str
    partner: str
    path: str
    line: int


def all_points() -> list[Point]:
    """Every mark of the package."""
    points = []
    for path in sorted(Path(shm.__file__).parent.rglob("*.py")):
        lines = path.read_text().splitlines()
        for index, line in enumerate(lines):
            mark = _MARK.search(line)
            assert bool(mark) == bool(_ANY.search(line)), f"{path}:{index + 1}: a mark names its partner"
            if mark:
                points.append(Point(name=mark[1], partner=mark[2], path=str(path), line=index + 2))
    return points


def find(name: str) -> Point:
    """The point of this name."""
    return next(point for point in all_points() if point.name == name)


def adopt(fd: int) -> socket.socket:
    """The socket behind an inherited descriptor."""
    return socket.socket(fileno=fd)
