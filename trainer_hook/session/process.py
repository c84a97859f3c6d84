"""Process-wide setup in the trainer: closing at exit, and crash reports."""

import atexit
import contextlib
import faulthandler
import io
import sys
import weakref
from typing import Protocol

from trainer_hook.errors import EndOfData


class Closable(Protocol):
    def close(self) -> None: ...


_OPEN: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def close_at_exit(hook: Closable) -> None:
    """Close a hook when the interpreter exits normally.

    After an exception the hook stays open, so that the hub sees a crash: other ranks may wait for this rank.
    """
    _OPEN.add(hook)


@atexit.register
def _close_all() -> None:
    if not hasattr(sys, "last_type"):  # set by an uncaught exception
        for hook in list(_OPEN):
            hook.close()


def is_orderly(error: BaseException | None) -> bool:
    """Whether a hook's block ended normally, not by a failure."""
    if isinstance(error, SystemExit):
        return not error.code
    return error is None or isinstance(error, EndOfData | GeneratorExit)


def name_crashes() -> None:
    """Print the line of a segmentation fault, such as a write to the ring, to stderr."""
    if not faulthandler.is_enabled():
        with contextlib.suppress(io.UnsupportedOperation, RuntimeError, ValueError):  # no stderr to write to
            faulthandler.enable()
