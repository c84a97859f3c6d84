"""Keeps a forked child from claiming, releasing or sending on behalf of its parent.

In: objects with a `disarm` method. Out: each is disarmed in every child of `os.fork`, such as DataLoader
workers; the parent's objects are unchanged.
"""

import os
import weakref
from typing import Protocol


class Disarmable(Protocol):
    """An object that acts on shared state and belongs to one process."""

    def disarm(self) -> None:
        """Stop acting on the parent's state; called in a forked child."""


_ARMED: "weakref.WeakSet[Disarmable]" = weakref.WeakSet()


def disarm_in_children(thing: Disarmable) -> None:
    """Call `thing.disarm()` in every child forked while `thing` exists."""
    _ARMED.add(thing)


def _disarm_all() -> None:
    for thing in list(_ARMED):
        thing.disarm()
    _ARMED.clear()


os.register_at_fork(after_in_child=_disarm_all)
