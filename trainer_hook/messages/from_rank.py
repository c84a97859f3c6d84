"""Messages from a trainer rank, or an observer, to the hub."""

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
    """The `with` block raised: the step was not trained."""


class Released(Message):
    """A rank has ended its part of a step (`outcome`), and no longer views the records in `sequences`."""

    step: int
    outcome: Outcome | None
    """None for a release after the step's end."""
    sequences: list[int]


class UpdateEnter(Message):
    """A rank enters a weight update; answered by `UpdateBegun` when all ranks have."""

    request: int


class UpdatePublish(Message):
    """A rank leaves the update. The leader's message names what to publish; answered by `UpdateDone`."""

    request: int
    leader: bool
    path: str | None = None
    """Folder of safetensors files for the engines to load; None: they already have the weights."""
    is_streamed: bool = False
    """The engines received the weights by `UpdateStage`s; no file contains them."""
    probes: list[Probe] = []
    """Sample values from the files in `path`."""
    scored: Scored | None = None
    """Check for engines that cannot report values of weights."""
    version: int | None = None
    """The version that another node's run published, if it updates the engines."""


class UpdateStage(Message):
    """The leader sends the next stage of a stream to the engines; answered by `StageTaken`."""

    request: int
    stage: Stage


class UpdatePassed(Message):
    """A rank has sent its weights; answered by `PassEnded` when all ranks have."""

    request: int
    again: bool = False
    """Repeat the pass, because engines were lost during it."""
    failure: str | None = None
    """Reason if the engines did not load the weights."""


class UpdatePause(Message):
    """The leader asks to pause the engines, to send weights itself; answered by `Reply`."""

    request: int


class UpdateCancel(Message):
    """The update's block raised: engines continue with the old version."""

    request: int
    text: str


class Abort(Message):
    """Abort running requests: all, of one group or one sample, or of groups started before a version;
    answered by `Aborted`."""

    request: int
    group: int | None = None
    member: int | None = None
    older_than: int | None = None


class Hold(Message):
    """Stop (`held`) or continue starting groups; running groups finish. Answered by `Reply`."""

    request: int
    held: bool


class QueryStatistics(Message):
    """Answered by `StatisticsTaken`."""

    request: int


class QuerySnapshot(Message):
    """From an observer; answered by `SnapshotTaken`."""

    request: int
    steps_seen: int = 0
    """`totals.steps` of the observer's last snapshot; the answer contains the steps since."""
    updates_seen: int = 0


class RunState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run's part of a trainer's checkpoint, in `StateTaken` and `LoadState`."""

    step: int
    """Steps trained."""
    version: int
    lineage: str
    cursor: int
    """First group not taken from the data yet."""
    unfinished: list[int]
    """Groups below the cursor that are not settled."""
    ends: dict[str, int]
    """Settled groups by outcome."""
    handed: int = 0
    """Groups trained since `version` was published."""
    data: str = ""
    """Description of the data and its order; group ids are valid only for these."""


class TakeState(Message):
    """Ask for the run's state; answered by `StateTaken` once every rank has trained the counted steps."""

    request: int
    step: int
    """This rank has trained all steps below."""
    payload: bool
    """Include finished groups in full."""
    interrupt: bool
    """Abort running requests briefly, to collect all tokens generated so far."""


class QueryWeights(Message):
    """Ask which weights the engines have, once they have them; answered by `WeightsReport`."""

    request: int


class FollowWeights(Message):
    """With shared engines: the weights that the leader's run published. Answered by `Reply`."""

    request: int
    lineage: str
    version: int
    pending: bool
    """The engines do not have the checkpoint's weights yet."""


class StateCopied(Message):
    """The records of `StateTaken` were copied; their leases end."""

    snapshot: int
    sequences: list[int]


class KeptKind(StrEnum):
    """How much of a group a checkpoint contains."""

    RECORD = "record"
    """The whole group: it was finished."""
    PARTIAL = "partial"
    """The tokens generated so far."""


class KeptEntry(msgspec.Struct, frozen=True, array_like=True):
    """Location of a group in a file, and the versions of its tokens."""

    group: int
    kind: KeptKind
    oldest_version: int
    newest_version: int
    offset: int
    length: int


class LoadState(Message):
    """Load the state of a checkpoint, before the first batch; answered by `StateLoaded`."""

    request: int
    state: RunState | None
    """None: restart the run."""
    kept_path: str = ""
    """File with the checkpoint's unfinished groups; the hub removes it."""
    kept: list[KeptEntry] = []


class EvaluationPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt of an evaluation."""

    prompt: str | list[dict[str, Any]]
    """Text, or chat messages."""
    label: Any = None
    """User data for the reward."""
    metadata: dict[str, Any] = {}
    """User data."""


class EvaluationOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What to evaluate: prompts, or a data set by name or path; neither: the configured data set."""

    prompts: list[EvaluationPrompt] | None = None
    dataset: str | None = None
    samples_per_prompt: int | None = None
    sampling: dict[str, Any] = {}
    """Keys that override the configured sampling parameters."""


class Evaluate(Message):
    """Start an evaluation; answered by `EvaluationBegun`."""

    request: int
    order: EvaluationOrder


class Collect(Message):
    """Ask for new results of an evaluation; answered by `EvaluationPart` or `Refused`."""

    request: int
    evaluation: int


class CancelEvaluation(Message):
    """Cancel an evaluation and discard its results; answered by `Reply`."""

    request: int
    evaluation: int


class Goodbye(Message):
    """The rank leaves normally; its leases end without an error."""
