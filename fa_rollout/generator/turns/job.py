"""One group in the generator's hands, from its assignment to its `Commit` or `Settled`."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fa_rollout.generator.turns.turn import Draft
from fa_rollout.sample import IntArray, Sample
from fa_rollout.user_code.deadline import Deadline
from trainer_hook.messages import Assignment, KeptEntry, Settlement

_MANY_TURNS = 3
"""A function with fewer is ended by limits of its requests, or of its own time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnding:
    """How a group ends that becomes no record."""

    outcome: Settlement
    reason: str
    mean_response_len: float = 0.0
    samples: tuple[Sample, ...] = ()
    """Where all of them had come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStart:
    """What a checkpoint kept of a group, and the file that has it."""

    path: str
    entry: KeptEntry


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """State of one assignment."""

    assignment: Assignment
    started_s: float = 0.0
    """When its work began."""
    label: Any = None
    prompt_ids: IntArray | None = None
    """Once they are made."""
    head_start: HeadStart | None = None
    drafts: dict[int, Draft] = field(default_factory=dict)
    """By member, its answer so far, where it is made by one turn."""
    task: "asyncio.Task[GroupEnding | None] | None" = None
    stream: str = "g"
    """First letters of its request ids: training, or one evaluation."""
    num_claimed: int = 0
    """Samples that still count against the concurrency."""
    sent: bool = False
    """Its first request has left."""
    active_s: Callable[[], float] = lambda: 0.0
    """Seconds that it has been at work, without those in which no engine was there for it."""
    calls: dict[Deadline, float] = field(default_factory=dict)
    """Generate functions of the user's that run for it, by their deadline, and `active_s` when they began."""
    ending: GroupEnding | None = None
    """Why it was cancelled."""

    @contextmanager
    def calling(self, deadline: Deadline) -> Iterator[None]:
        """A generate function of the user's runs inside of this block."""
        self.calls[deadline] = self.active_s()
        try:
            yield
        finally:
            del self.calls[deadline]

    def end_calls(self, limit_s: float, rule: str) -> None:
        """End generate functions that have taken turn after turn for so long."""
        for deadline, begun_s in list(self.calls.items()):
            if deadline.num_renewals >= _MANY_TURNS and self.active_s() - begun_s >= limit_s:
                deadline.expire(rule)

    def end(self, ending: GroupEnding) -> None:
        """Cancel it: it is answered with `ending`, unless it is committed in this moment."""
        if self.ending is None and self.task is not None:
            self.ending = ending
            self.task.cancel()
