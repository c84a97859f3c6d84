"""What the hub says to a trainer rank."""

import msgspec

from trainer_hook.messages.base import Message
from trainer_hook.messages.from_generator import Commit
from trainer_hook.messages.from_rank import RunState
from trainer_hook.messages.streaming import Audience


class Handout(Message):
    """One record of a batch, as a rank gets it."""

    incarnation: int
    sequence: int
    position: int
    """Byte position in the ring's endless stream; the offset is its remainder by the ring's size."""
    length: int


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One sample of one micro-batch."""

    record: int
    """Index into `Batch.records`."""
    member: int
    """Index of the sample inside the record."""
    filler: bool = False
    """True for padding: the sample's loss mask counts as zero."""
    mask_before: int = 0
    """Response tokens from the start that leave the loss (stale tokens under the `mask` policy)."""


class Batch(Message):
    """A rank's part of a step."""

    request: int
    step: int
    version: int
    """Published version at hand-over; training turns it into the next one."""
    records: list[Handout]
    micro_batches: list[list[Part]]
    num_groups_global: int
    num_samples_global: int
    num_tokens_global: int
    """Response tokens in the loss over all ranks."""
    num_ranks_global: int
    """Data-parallel ranks that share the step."""
    reward_mean: float
    """Over the samples that are trained."""
    num_rewards_global: int
    """How many these are."""
    staleness_max: int | None
    """None where an engine told no version."""
    wait_s: float
    """Time the rank's request waited in the hub."""
    last: bool = False
    """No batch follows; it may be smaller than the others where the data ends."""


class Ended(Message):
    """Answer to `Next` when no further batch will come."""

    request: int
    reason: str


class UpdateBegun(Message):
    request: int
    version: int
    """The version that this update will publish."""
    path: str
    """Folder to write weight files to (exists, empty)."""
    leader: bool
    model: str | None = None
    """Folder of the engines' model, where it is known."""
    rest: str | None = None
    """Folder of the weights that a partial push by files is completed by; None: no file holds them."""
    must_be_whole: bool = False
    """Engines lack the weights that a partial push would leave as they are."""


class UpdateDone(Message):
    request: int
    version: int
    bubble_s: float
    """Time the engines stood still."""


class EvaluationPart(Message):
    """Some prompts of an evaluation, each once, in the order of their ends."""

    request: int
    results: list[bytes]
    """Each an encoded `trainer_hook.calls.evaluation.EvaluatedPrompt`."""
    num_prompts: int
    """In all; 0 while that is unknown."""
    is_over: bool
    """No part follows."""


class Reply(Message):
    """What was asked for is done."""

    request: int


class Aborted(Message):
    """Answer to `Abort`."""

    request: int
    num_groups: int


class EvaluationBegun(Message):
    """Answer to `Evaluate`."""

    request: int
    evaluation: int


class StageTaken(Message):
    """Answer to `UpdateStage`."""

    request: int
    audience: Audience | None
    """Of `OpenStream` alone."""


class PassEnded(Message):
    """Answer to `UpdatePassed`: what the leader says, once all ranks are through."""

    request: int
    again: bool
    failure: str | None


class WeightsTold(Message):
    """Answer to `TellWeights`."""

    request: int
    lineage: str
    version: int
    pending: bool
    """They lack the weights of a checkpoint."""


class StateLoaded(Message):
    """Answer to `LoadState`: where the run stands now."""

    request: int
    step: int
    version: int
    lineage: str


class RingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    bytes: int
    span_bytes: int
    """From tail to head."""
    live_bytes: int
    """What records hold."""
    num_records: int
    oldest_lease_s: float


class HubStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The hub's part of `hook.statistics()`."""

    counts: dict[str, int]
    """Groups by where they are; empty before the data is read."""
    step: int
    version: int
    lineage: str
    update: str
    waits_for: str
    ring: RingStatistics
    refused_records: int
    mean_record_bytes: float
    trained_tokens: float
    dropped_tokens: float
    generator: dict[str, float]
    """The figures of its last `Pulse`; empty while none is up."""


class StatisticsTaken(Message):
    """Answer to `QueryStatistics`."""

    request: int
    statistics: HubStatistics


class SnapshotTaken(Message):
    """Answer to `QuerySnapshot`."""

    request: int
    snapshot: bytes
    """An encoded snapshot, which only viewers read."""


class StateTaken(Message):
    """The run's state, the same for every rank that asks between the same two steps.

    The rank copies what it is pointed to, and says so by `StateCopied`.
    """

    request: int
    snapshot: int
    state: RunState
    partials_path: str = ""
    """File of the tokens that samples under way have, a block of `trainer_hook.calls.kept`."""
    records: list[Commit] = []
    """Finished groups; leased to the rank."""
    num_left_out: int = 0
    """Finished groups that are beyond `Welcome.checkpoint_bytes`."""


class Notice(Message):
    """Something degraded that repairs itself; the hook logs it as a warning."""

    text: str


class Progress(Message):
    """How the run gets on, in one line; the hook of rank 0 logs it, the launcher prints it."""

    text: str


class Fatal(Message):
    """The run is given up; every pending and later hook call raises `error`."""

    error: str
    """Name of the error class in `trainer_hook.errors`."""
    text: str
