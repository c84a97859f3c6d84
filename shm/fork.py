"""What a forked child must not do: claim, release or send in its parent's name.

In: objects with a `disarm` method. Out: each is disarmed in every child that `os.fork` makes (DataLoader
workers fork); the parent's are untouched.
"""

import os
import weakref
from typing import Protocol


class Disarmable(Protocol):
    """Something that acts on shared state and so belongs to one process."""

    def disarm(self) -> None:
        """Give up every power over the parent's state; called in a forked child."""


_ARMED: "weakref.WeakSet[Disarmable]" = weakref.WeakSet()


def disarm_in_children(thing: Disarmable) -> None:
    """Call `thing.disarm()` in every child forked while `thing` lives."""
    _ARMED.add(thing)


def _disarm_all() -> None:
    for thing in list(_ARMED):
        thing.disarm()
    _ARMED.clear()


os.register_at_fork(after_in_child=_disarm_all)
