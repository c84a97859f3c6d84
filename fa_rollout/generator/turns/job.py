"""One group in the generator's hands, from its assignment to its `Commit` or `Settled`."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from fa_rollout.generator.turns.turn import Draft
from fa_rollout.sample import IntArray, Sample
from trainer_hook.messages import Assignment, KeptEntry, Settlement


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
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
    task: "asyncio.Task[Ending | None] | None" = None
    stream: str = "g"
    """First letters of its request ids: training, or one evaluation."""
    rids: dict[str, int] = field(default_factory=dict)
    """Request ids that an engine may be working on, and whose member's each is."""
    num_claimed: int = 0
    """Samples that still count against the concurrency."""
    sent: bool = False
    """Its first request has left."""
    ending: Ending | None = None
    """Why it was cancelled."""

    def end(self, ending: Ending) -> None:
        """Cancel it: it is answered with `ending`, unless it is committed in this moment."""
        if self.ending is None and self.task is not None:
            self.ending = ending
            self.task.cancel()
