"""The state of one group in the generator, from its assignment to its `Commit` or `Settled`."""

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
"""Functions with fewer turns are ended by their requests' limits or their own time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnding:
    """How a group without a record ends."""

    outcome: Settlement
    reason: str
    mean_response_len: float = 0.0
    samples: tuple[Sample, ...] = ()
    """The samples, if all were complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadStart:
    """A group's part of a checkpoint, and the file that contains it."""

    path: str
    entry: KeptEntry


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """State of one assignment."""

    assignment: Assignment
    started_s: float = 0.0
    """When it was started."""
    label: Any = None
    prompt_ids: IntArray | None = None
    """Once they are made."""
    head_start: HeadStart | None = None
    drafts: dict[int, Draft] = field(default_factory=dict)
    """By member: the answer so far, for samples of one turn."""
    task: "asyncio.Task[GroupEnding | None] | None" = None
    stream: str = "g"
    """First letters of its request ids: training, or one evaluation."""
    num_claimed: int = 0
    """Samples that still count against the concurrency."""
    sent: bool = False
    """Its first request was sent."""
    active_s: Callable[[], float] = lambda: 0.0
    """Active seconds so far, without time in which no engine was available."""
    calls: dict[Deadline, float] = field(default_factory=dict)
    """Running generate functions, by their deadline, and `active_s` at their start."""
    ending: GroupEnding | None = None
    """Why it was cancelled."""

    @contextmanager
    def calling(self, deadline: Deadline) -> Iterator[None]:
        """Register a generate function that runs inside this block."""
        self.calls[deadline] = self.active_s()
        try:
            yield
        finally:
            del self.calls[deadline]

    def end_calls(self, limit_s: float, rule: str) -> None:
        """End generate functions that have taken turns for `limit_s`."""
        for deadline, begun_s in list(self.calls.items()):
            if deadline.num_renewals >= _MANY_TURNS and self.active_s() - begun_s >= limit_s:
                deadline.expire(rule)

    def end(self, ending: GroupEnding) -> None:
        """Cancel the group; it is answered with `ending` unless it is just being committed."""
        if self.ending is None and self.task is not None:
            self.ending = ending
            self.task.cancel()
