"""The place in user code: file, line and function of its innermost frame.

In: an exception, a task or a function. Out: a `CodePlace`, or None if no frame is known. Frames in the user's
own files are preferred over installed packages, and these over the standard library.
"""

import asyncio
import functools
import gc
import inspect
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

_PACKAGE = Path(__file__).parents[1]
_OURS = tuple(f"{_PACKAGE.parent / name}/" for name in ("fa_rollout", "trainer_hook", "shm"))
_RUNNERS = f"{Path(__file__).parent}/"
_ASYNCIO = f"{Path(asyncio.__file__).parent}/"
_INSTALLED = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib"))
_STDLIB = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_MAX_FRAMES = 1000


class Owner(IntEnum):
    """Who wrote a file of code; smaller values are more useful to the user."""

    USER = 0
    INSTALLED = 1
    PROJECT = 2
    PYTHON = 3


@dataclass(frozen=True, slots=True)
class CodePlace:
    """A line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def of_error(error: BaseException) -> CodePlace | None:
    """Where an exception was raised; for a group, where its first exception was."""
    error = first_of(error)
    frames = traceback.walk_tb(error.__traceback__)
    return innermost(CodePlace(f.f_code.co_filename, line, f.f_code.co_name) for f, line in frames)


def of_task(task: "asyncio.Task[Any]") -> CodePlace | None:
    """Where a task waits, following the tasks that it awaits."""
    return innermost(_frames_below(task))


def of_function(function: Any) -> CodePlace | None:
    """Where a function is defined."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):
        function = getattr(type(function).__call__, "__func__", type(function).__call__)
    code = getattr(function, "__code__", None)
    return None if code is None else CodePlace(code.co_filename, code.co_firstlineno, code.co_name)


def in_words(place: CodePlace | None) -> str:
    """The place as the suffix of a message."""
    return "" if place is None else f" ({place})"


def first_of(error: BaseException) -> BaseException:
    """The first exception of a group; the others are usually consequences of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def is_users(file: str) -> bool:
    """Whether a file is the user's: not part of this project and not installed."""
    return owner_of(file) is Owner.USER


def innermost(frames: Iterable[CodePlace]) -> CodePlace | None:
    """The user's innermost frame. `frames`: from the outermost to the innermost."""
    best: CodePlace | None = None
    for place in frames:
        if place.file.startswith(_RUNNERS):
            continue
        if best is None or owner_of(place.file) <= owner_of(best.file):
            best = place
    return best


@lru_cache(maxsize=4096)
def owner_of(file: str) -> Owner:
    """The owner of a file of code."""
    if file.startswith(_OURS):
        return Owner.PROJECT
    if file.startswith(_INSTALLED):  # in some installations inside the standard library's folder
        return Owner.INSTALLED
    return Owner.PYTHON if file.startswith((*_STDLIB, "<frozen")) else Owner.USER


def _frames_below(task: "asyncio.Task[Any]") -> Iterator[CodePlace]:
    """Frames from a task's outermost coroutine to what it finally awaits, through other tasks."""
    found: Any = task.get_coro()
    seen: set[int] = set()
    while found is not None and id(found) not in seen and len(seen) < _MAX_FRAMES:
        seen.add(id(found))
        frame, below = _opened(found)
        if frame is not None:
            yield CodePlace(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        found = _followed(below) or (None if frame is None else _task_in(frame))


def _opened(found: Any) -> tuple[FrameType | None, Any]:
    """The frame of a coroutine or generator, and what it awaits."""
    for prefix, waits in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
        if hasattr(found, waits):
            return getattr(found, f"{prefix}_frame"), getattr(found, waits)
    return None, found


def _followed(awaited: Any) -> Any:
    """The coroutine behind an awaitable, found through its references."""
    if awaited is None or hasattr(awaited, "cr_await") or hasattr(awaited, "gi_yieldfrom"):
        return awaited
    for candidate in [awaited, *gc.get_referents(awaited)]:
        if isinstance(candidate, asyncio.Task):
            return candidate.get_coro()
        if hasattr(candidate, "ag_await") or hasattr(candidate, "cr_await"):
            return candidate
        children = getattr(candidate, "_children", None)  # of `asyncio.gather`
        if children is not None:
            return _first_pending(children)
    return None


def _task_in(frame: FrameType) -> Any:
    """The task awaited by `wait`, `wait_for` or a task group; only its frame holds the reference."""
    if not frame.f_code.co_filename.startswith(_ASYNCIO):
        return None
    for value in list(frame.f_locals.values()):
        many = getattr(value, "_tasks", value)
        if isinstance(many, set | list | tuple | frozenset):
            found = _first_pending(many)
        else:
            found = _first_pending([many])
        if found is not None:
            return found
    return None


def _first_pending(futures: Iterable[Any]) -> Any:
    tasks = (future for future in futures if isinstance(future, asyncio.Task))
    return next((task.get_coro() for task in tasks if not task.done()), None)
