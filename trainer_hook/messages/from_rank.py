"""What a trainer rank, or an observer, says to the hub."""

from enum import StrEnum
from typing import Any

import msgspec

from trainer_hook.messages.base import Message
from trainer_hook.messages.streaming import Probe, Scored, Stage


class Next(Message):
    """A rank asks for its part of a step's batch; answered by `Batch`, `Ended` or `Refused`."""

    request: int
    step: int


class Outcome(StrEnum):
    """How a rank ended its part of a batch."""

    TRAINED = "trained"
    RETURNED = "returned"
    """The body of the `with` block raised: the step was not trained."""


class Released(Message):
    """A rank's part of a step is over (`outcome`); no view is left of the records in `sequences`."""

    step: int
    outcome: Outcome | None
    """None when a deferred release follows later than the step's end."""
    sequences: list[int]


class UpdateEnter(Message):
    """A rank enters a weight update; answered by `UpdateBegun` when all ranks have."""

    request: int


class UpdatePublish(Message):
    """A rank leaves the update. The leader's message names what to publish; answered by `UpdateDone`."""

    request: int
    leader: bool
    path: str | None = None
    """Folder of safetensors files for the engines to load; None when they have the weights already."""
    is_streamed: bool = False
    """The engines took the weights by `UpdateStage`s, so that no file holds them."""
    probes: list[Probe] = []
    """Some numbers of the files in `path`."""
    scored: Scored | None = None
    """What engines are asked that cannot report such numbers."""
    version: int | None = None
    """Where another node's run has given the engines their weights: the version that it did."""


class UpdateStage(Message):
    """The leader asks the engines to take the next step of a stream; answered by `StageTaken`."""

    request: int
    stage: Stage


class UpdatePassed(Message):
    """A rank is through with its weights; answered by `PassEnded` when all are."""

    request: int
    again: bool = False
    """Once more, since engines were lost in the middle."""
    failure: str | None = None
    """The engines did not take the weights."""


class UpdatePause(Message):
    """The leader asks that the engines stand still, to push by hand; answered by `Reply`."""

    request: int


class UpdateCancel(Message):
    """The body of the update raised: engines go on with the old version."""

    request: int
    text: str


class Abort(Message):
    """Abort running work: all of it, one group or one sample of it, or groups begun before a version;
    answered by `Aborted`."""

    request: int
    group: int | None = None
    member: int | None = None
    older_than: int | None = None


class Hold(Message):
    """Stop (`held`) or go on issuing groups; running ones finish. Answered by `Reply`."""

    request: int
    held: bool


class QueryStatistics(Message):
    """Answered by `StatisticsTaken`."""

    request: int


class QuerySnapshot(Message):
    """An observer's; answered by `SnapshotTaken`."""

    request: int
    steps_seen: int = 0
    """`totals.steps` of the last snapshot that the asker has: the next one brings the steps since."""
    updates_seen: int = 0


class RunState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run's part of a trainer's checkpoint: what `StateTaken` brings, and `LoadState` brings back."""

    step: int
    """Steps trained."""
    version: int
    lineage: str
    cursor: int
    """First group never taken from the data."""
    unfinished: list[int]
    """Groups below the cursor that are not settled."""
    ends: dict[str, int]
    """Settled groups by outcome."""
    handed: int = 0
    """Groups trained since `version` was published."""
    data: str = ""
    """The data and its order, in words: group ids have a meaning only with them."""


class TakeState(Message):
    """Ask for the run's state; answered by `StateTaken` once every rank has trained what it counts."""

    request: int
    step: int
    """Steps below it are trained by this rank."""
    payload: bool
    """Finished groups are wanted whole."""
    interrupt: bool
    """Running requests are ended for a moment, so that all tokens so far are told."""


class TellWeights(Message):
    """Ask which weights the engines were given, once they were; answered by `WeightsTold`."""

    request: int


class FollowWeights(Message):
    """Where nodes share engines: what the run that leads gave them. Answered by `Reply`."""

    request: int
    lineage: str
    version: int
    pending: bool
    """They lack the weights of a checkpoint, as it does itself."""


class StateCopied(Message):
    """All that `StateTaken` pointed to was copied; its leases end."""

    snapshot: int
    sequences: list[int]


class KeptKind(StrEnum):
    """What a checkpoint keeps of a group."""

    RECORD = "record"
    """All of it: it was finished."""
    PARTIAL = "partial"
    """The tokens that its samples had."""


class KeptEntry(msgspec.Struct, frozen=True, array_like=True):
    """Where a kept group lies in a file, and how old its tokens are."""

    group: int
    kind: KeptKind
    oldest_version: int
    newest_version: int
    offset: int
    length: int


class LoadState(Message):
    """Give the run the state of a checkpoint before its first batch; answered by `StateLoaded`."""

    request: int
    state: RunState | None
    """None: the run's own beginning."""
    kept_path: str = ""
    """File of what the checkpoint kept of unfinished groups; the hub's to remove."""
    kept: list[KeptEntry] = []


class EvaluationPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that an evaluation brings along."""

    prompt: str | list[dict[str, Any]]
    """Text, or messages as the chat template takes them."""
    label: Any = None
    """The user's own, for the reward."""
    metadata: dict[str, Any] = {}
    """The user's own."""


class EvaluationOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What to evaluate: prompts, or a data set by name or path; neither: the one that is configured."""

    prompts: list[EvaluationPrompt] | None = None
    dataset: str | None = None
    samples_per_prompt: int | None = None
    sampling: dict[str, Any] = {}
    """Keys of the configured sampling that differ."""


class Evaluate(Message):
    """Begin an evaluation; answered by `EvaluationBegun`."""

    request: int
    order: EvaluationOrder


class Collect(Message):
    """Ask for what an evaluation has brought since; answered by `EvaluationPart`, or `Refused`."""

    request: int
    evaluation: int


class CancelEvaluation(Message):
    """What an evaluation has brought is not wanted any more; answered by `Reply`."""

    request: int
    evaluation: int


class Goodbye(Message):
    """The rank closes in order; its leases return without alarm."""
