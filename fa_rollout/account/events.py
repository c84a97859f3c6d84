"""What the run's event log holds: one struct for each event, shared by the hub and all readers.

Invariant: a field without a default is written with every event.
"""

# mypy: disable-error-code="misc"
# msgspec hands `frozen` and `kw_only` down to subclasses; the dataclass protocol that mypy knows does not.

import time
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import msgspec

from fa_rollout.account.figures import StepFigures, TimeSpent, UpdateFigures
from fa_rollout.account.reasons import kind_of
from trainer_hook.messages import Outcome, Settlement

AssignedSample = tuple[int, int, bool, int]
"""(group, member, filler, mask_before)"""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Root of all events."""

    t: float = msgspec.field(default_factory=time.monotonic)
    """time.monotonic() of the host when the event was made."""


Note = Callable[[Event], object]
"""Writes an event to the log."""


# --- the run ------------------------------------------------------------------------------------------


class HubBegan(Event, tag="began"):
    """A launch: a new life of the hub."""

    run: str
    lineage: str
    time_s: float
    """Unix time of `t`."""
    folder: str
    """Working directory, which paths in `config` are relative to."""
    config: dict[str, Any]
    """As the user wrote it, without secrets."""


class HubEnded(Event, tag="ended"):
    exit_code: int
    text: str
    counts: dict[str, int]
    """Groups by where they are at the end."""
    spent: TimeSpent
    """The trainer's time since its first batch."""


class WarningLogged(Event, tag="warning"):
    text: str


class RunFailed(Event, tag="fatal"):
    error: str
    text: str


# --- groups -------------------------------------------------------------------------------------------


class GroupsIssued(Event, tag="issued"):
    """Groups went to the generator."""

    groups: list[int]
    attempts: list[int]
    kept: list[int]
    """Groups that continue from tokens kept by a checkpoint."""


class GroupsDispatched(Event, tag="dispatched"):
    """The first request of each group went to an engine."""

    groups: list[int]
    version: int


class GroupRecorded(Event):
    """A group's record arrived."""

    group: int
    attempt: int
    sequence: int
    bytes: int
    versions: tuple[int, int]
    """Oldest and newest version that sampled a token of it."""
    prompt_lens: list[int]
    response_lens: list[int]
    rewards: list[float | None]
    """By sample; None for one that is not trained."""


class GroupCommitted(GroupRecorded, tag="committed"):
    """The record is in the books."""


class RecordRefused(GroupRecorded, tag="refused"):
    """Its place in the ring is invalid."""


class RecordUnwanted(GroupRecorded, tag="unwanted"):
    """The group is at another attempt, or settled."""


class GroupSettled(Event):
    """An attempt ended without being trained."""

    group: int
    attempt: int
    reason: str


class GroupLost(GroupSettled):
    """The group has ended: it will not be issued again."""

    outcome: ClassVar[Settlement]

    @property
    def kind(self) -> str:
        """The reason without its particulars, by which lost groups are counted."""
        return kind_of(self.reason)


class GroupFiltered(GroupLost, tag="filtered"):
    outcome = Settlement.FILTERED


class GroupFailed(GroupLost, tag="failed"):
    outcome = Settlement.FAILED


class GroupDropped(GroupLost, tag="dropped"):
    outcome = Settlement.DROPPED


class GroupReturned(GroupSettled, tag="returned"):
    """Back in the data: it will be issued again."""


class SettlementUnwanted(GroupSettled, tag="settlement_unwanted"):
    """The group is at another attempt, or settled."""


SETTLED: dict[Settlement, type[GroupSettled]] = {
    Settlement.FILTERED: GroupFiltered,
    Settlement.FAILED: GroupFailed,
    Settlement.DROPPED: GroupDropped,
    Settlement.RETURNED: GroupReturned,
}


# --- steps --------------------------------------------------------------------------------------------


class StepComposed(Event, tag="composed"):
    step: int
    version: int
    groups: list[int]
    ranks: list[list[list[AssignedSample]]]
    """By data-parallel rank and micro-batch."""


class PartHanded(Event, tag="handed"):
    """A rank got its part of a step."""

    step: int
    rank: int
    peer: int
    waited_s: float


class PartFinished(Event, tag="finished"):
    """A rank left its part of a step."""

    step: int
    rank: int
    peer: int
    outcome: Outcome


class StepTrained(Event, tag="trained"):
    """All ranks trained their parts."""

    step: int
    version: int
    groups: list[int]
    figures: StepFigures


class StepReturned(Event, tag="step_returned"):
    """The step was not trained by all ranks; its groups are committed again."""

    step: int
    groups: list[int]


# --- weights ------------------------------------------------------------------------------------------


class UpdateMoved(Event, tag="update"):
    """A weight update reached its next phase."""

    phase: Literal["entering", "open", "paused", "publishing", "failed"]
    version: int | None = None
    """None before one is chosen, and for a failure."""
    text: str = ""
    """Why it failed."""


class VersionPublished(Event, tag="published"):
    """The engines have loaded a version."""

    version: int
    figures: UpdateFigures | None
    """None for an update that the hub took no part in."""


class FirstWeightsLoaded(Event, tag="first_weights"):
    """The engines were told to load the weights that they started with."""

    path: str
    lineage: str


class StrangersFound(Event, tag="strangers"):
    """Engines hold weights of another run."""

    engines: list[str]
    first_weights: str | None


class LeaderFollowed(Event, tag="follows"):
    """Where nodes share engines: the versions are those of the first node's run."""

    lineage: str
    version: int
    pending: bool


# --- evaluations --------------------------------------------------------------------------------------


class EvaluationBegan(Event, tag="evaluation"):
    number: int
    rank: int
    dataset: str | None


class EvaluationFinished(Event, tag="evaluated"):
    number: int
    prompts: int
    error: str | None


# --- processes ----------------------------------------------------------------------------------------


class GeneratorStarted(Event, tag="generator_started"):
    incarnation: int


class GeneratorOpened(Event, tag="generator_ready"):
    incarnation: int
    engines: list[str]
    concurrency: int


class GeneratorDied(Event, tag="generator_died"):
    how: str
    requeued: list[int]


class EngineChanged(Event, tag="engine"):
    """An engine is to join or leave, or has."""

    url: str
    joins: bool
    phase: Literal["asked", "done", "refused"]
    error: str | None = None


class RankAttached(Event, tag="attached"):
    rank: int
    peer: int
    pid: int
    attach: int


class RankLeft(Event, tag="left"):
    rank: int
    attach: int
    in_order: bool


class LeaseEnded(Event, tag="released"):
    """A rank that left no longer reads this record."""

    sequence: int
    attach: int


class ShardAssigned(Event, tag="shard"):
    """The first rank's node says which prompts this run takes."""

    shard: int
    num_shards: int


# --- checkpoints --------------------------------------------------------------------------------------


class StateSaved(Event, tag="state"):
    """The run's state went into a checkpoint."""

    step: int
    cursor: int
    unfinished: int


class StateRestored(Event, tag="loaded"):
    """The run continues from a checkpoint, under a new lineage."""

    step: int
    version: int
    lineage: str
    of: str
    """The checkpoint's lineage."""
    cursor: int
    unfinished: list[int]
    ends: dict[str, int]
    kept: list[int]
    """Committed groups that are in the ring."""
    restored: list[int]
    """Groups whose records the checkpoint brings."""
    resumed: list[int]
    """Groups that continue from tokens of the checkpoint."""
