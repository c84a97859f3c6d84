"""On whose behalf code runs in the generator: set for a group's task, seen by all that it starts.

slime's functions know samples, not groups of ours; a context variable carries the group to the places where
slime's own semaphore and client were.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_rollout.generator.turns.job import Job
from fa_rollout.generator.turns.versions import VersionBook
from fa_rollout.user_code.deadline import Deadline
from trainer_hook.record import VersionSpan


@dataclass(slots=True, kw_only=True, eq=False)
class Errand:
    """One group at work."""

    job: Job
    place: Callable[[], AbstractAsyncContextManager[None]]
    """A place among the samples that engines work on."""
    depart: Callable[[Job], None]
    """To be called when the group's first sample begins."""
    prompt_ids: npt.NDArray[np.int32]
    """Of the prompt that all samples share; empty where that is not known."""
    prompt: Any = None
    """That prompt, once the samples are there."""
    book: VersionBook
    """Versions, as engines and slime tell them."""
    started_version: int
    """Version that engines held when its first sample began; its tokens are of this one or newer."""
    deadline: Deadline
    """Of slime's functions; it rests while engines work for them."""
    spans: dict[int, list[VersionSpan]] = field(default_factory=dict)
    """Version spans of samples, by `id`, whose tokens are all known by version."""
    begun: dict[int, Any] = field(default_factory=dict)
    """Turns that were begun before slime was there, by `id` of their sample."""

    def begin(self) -> None:
        """A sample begins, by whatever client it is made: the hub is told of the group's first one."""
        if not self.job.sent:
            self.job.sent = True
            self.started_version = self.book.published
            self.depart(self.job)


@contextmanager
def engines_at_work() -> Iterator[None]:
    """An engine is asked inside of this block: no time of the user's, and progress at its end."""
    errand = ERRAND.get()
    if errand is None:
        yield
        return
    with errand.deadline.paused():
        yield
    errand.deadline.renew()


ERRAND: ContextVar[Errand | None] = ContextVar("fa_rollout_errand", default=None)
_PLACE: ContextVar[AbstractAsyncContextManager[None] | None] = ContextVar("fa_rollout_place", default=None)


def current() -> Errand:
    """The group that the running task works for."""
    errand = ERRAND.get()
    assert errand is not None, "only tasks of a group come here"
    return errand


class ErrandPlaces:
    """Stands where slime's semaphore of samples stands: places are given out across groups, oldest first."""

    async def __aenter__(self) -> None:
        errand = current()
        place = errand.place()
        with errand.deadline.paused():
            await place.__aenter__()
        _PLACE.set(place)
        errand.begin()

    async def __aexit__(self, *error: Any) -> None:
        place = _PLACE.get()
        assert place is not None
        await place.__aexit__(*error)
