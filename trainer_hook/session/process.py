"""What a hook sets up in the trainer's process, once."""

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
    """Close a hook that its trainer forgot to close, when the interpreter ends in order.

    After an exception it stays open: the hub is to see a death, since other ranks may wait for this one.
    """
    _OPEN.add(hook)


@atexit.register
def _close_all() -> None:
    if not hasattr(sys, "last_type"):  # set by an exception that nobody caught
        for hook in list(_OPEN):
            hook.close()


def is_orderly(error: BaseException | None) -> bool:
    """Whether what ends a hook's block is the trainer's end, and no failure of it."""
    if isinstance(error, SystemExit):
        return not error.code
    return error is None or isinstance(error, EndOfData | GeneratorExit)


def name_crashes() -> None:
    """Have a forbidden write to the ring, which is a segmentation fault, name its line on stderr."""
    if not faulthandler.is_enabled():
        with contextlib.suppress(io.UnsupportedOperation, RuntimeError, ValueError):  # no stderr to write to
            faulthandler.enable()
