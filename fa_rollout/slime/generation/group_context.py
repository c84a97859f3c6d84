"""The group that the current task works for: a context variable, inherited by the tasks it starts.

slime's functions take samples, not our groups; the context variable carries the group to our replacements of
slime's semaphore and client.
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
class GroupContext:
    """One running group."""

    job: Job
    slot: Callable[[], AbstractAsyncContextManager[None]]
    """A slot among the samples that engines work on."""
    depart: Callable[[Job], None]
    """Called when the group's first sample starts."""
    prompt_ids: npt.NDArray[np.int32]
    """Ids of the prompt that all samples share; empty if unknown."""
    prompt: Any = None
    """That prompt, once the samples are unpickled."""
    book: VersionBook
    """Versions, as reported by engines and slime."""
    started_version: int
    """Version that engines held when its first sample started; its tokens are of this version or newer."""
    deadline: Deadline
    """For slime's functions; paused while they wait for engines."""
    spans: dict[int, list[VersionSpan]] = field(default_factory=dict)
    """Version spans by `id` of the sample, if the versions of all its tokens are known."""
    begun: dict[int, Any] = field(default_factory=dict)
    """Turns started before slime was imported, by `id` of the sample."""

    def begin(self) -> None:
        """A sample starts, with either client; reports the group's first sample to the hub."""
        if not self.job.sent:
            self.job.sent = True
            self.started_version = self.book.published
            self.depart(self.job)


@contextmanager
def engines_at_work() -> Iterator[None]:
    """Wraps a request to an engine: pauses the group's deadline, and renews it afterwards."""
    context = GROUP_CONTEXT.get()
    if context is None:
        yield
        return
    with context.deadline.paused():
        yield
    context.deadline.renew()


GROUP_CONTEXT: ContextVar[GroupContext | None] = ContextVar("fa_rollout_group", default=None)
_SLOT: ContextVar[AbstractAsyncContextManager[None] | None] = ContextVar("fa_rollout_slot", default=None)


def current() -> GroupContext:
    """The group of the running task."""
    context = GROUP_CONTEXT.get()
    assert context is not None, "only tasks of a group may call this"
    return context


class GroupSlots:
    """Replaces slime's semaphore of samples: slots are assigned across groups, oldest first."""

    async def __aenter__(self) -> None:
        context = current()
        slot = context.slot()
        with context.deadline.paused():
            await slot.__aenter__()
        _SLOT.set(slot)
        context.begin()

    async def __aexit__(self, *error: Any) -> None:
        slot = _SLOT.get()
        assert slot is not None
        await slot.__aexit__(*error)
