"""Messages from the hub to a trainer rank."""

import msgspec

from trainer_hook.messages.base import Message
from trainer_hook.messages.from_generator import Commit
from trainer_hook.messages.from_rank import RunState
from trainer_hook.messages.streaming import Audience


class Handout(Message):
    """One record of a rank's batch."""

    incarnation: int
    sequence: int
    position: int
    """Byte position in the ring's stream; the offset is the position modulo the ring's size."""
    length: int


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One sample of one micro-batch."""

    record: int
    """Index into `Batch.records`."""
    member: int
    """Index of the sample inside the record."""
    filler: bool = False
    """Padding: the sample's loss mask is treated as zero."""
    mask_before: int = 0
    """Number of leading response tokens to mask (stale tokens under the `mask` policy)."""


class Batch(Message):
    """A rank's part of a step."""

    request: int
    step: int
    version: int
    """Published version at delivery; training it produces the next version."""
    records: list[Handout]
    micro_batches: list[list[Part]]
    num_groups_global: int
    num_samples_global: int
    num_tokens_global: int
    """Response tokens in the loss over all ranks."""
    num_ranks_global: int
    """Data-parallel ranks that share the step."""
    reward_mean: float
    """Over the trained samples."""
    num_rewards_global: int
    """Number of trained samples with a reward."""
    staleness_max: int | None
    """None if an engine reported no version."""
    wait_s: float
    """Time the rank's request waited in the hub."""
    last: bool = False
    """This is the last batch; at the end of the data it may be smaller than the others."""


class Ended(Message):
    """Answer to `Next` if there are no more batches."""

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
    """Folder of the engines' model, if known."""
    rest: str | None = None
    """Folder with the other weights of a partial push by files; None: no file contains them."""
    must_be_whole: bool = False
    """Engines do not have the weights that a partial push would keep."""


class UpdateDone(Message):
    request: int
    version: int
    bubble_s: float
    """Time the engines were paused."""


class EvaluationPart(Message):
    """Finished prompts of an evaluation, each once, in order of completion."""

    request: int
    results: list[bytes]
    """Each an encoded `trainer_hook.calls.evaluation.EvaluatedPrompt`."""
    num_prompts: int
    """Total number of prompts; 0 until it is known."""
    is_over: bool
    """No part follows."""


class Reply(Message):
    """The request is done."""

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
    """Only for `OpenStream`."""


class PassEnded(Message):
    """Answer to `UpdatePassed`, once all ranks have finished: the leader's decision."""

    request: int
    again: bool
    failure: str | None


class WeightsReport(Message):
    """Answer to `QueryWeights`."""

    request: int
    lineage: str
    version: int
    pending: bool
    """The engines do not have the checkpoint's weights yet."""


class StateLoaded(Message):
    """Answer to `LoadState`: the resulting position of the run."""

    request: int
    step: int
    version: int
    lineage: str


class RingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    bytes: int
    span_bytes: int
    """From tail to head."""
    live_bytes: int
    """Bytes in records."""
    num_records: int
    oldest_lease_s: float


class HubStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The hub's part of `hook.statistics()`."""

    counts: dict[str, int]
    """Groups by state; empty before the data is read."""
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
    """Values of its last `Pulse`; empty if no generator is running."""


class StatisticsTaken(Message):
    """Answer to `QueryStatistics`."""

    request: int
    statistics: HubStatistics


class SnapshotTaken(Message):
    """Answer to `QuerySnapshot`."""

    request: int
    snapshot: bytes
    """An encoded snapshot, for viewers."""


class StateTaken(Message):
    """The run's state, the same for every rank that asks between the same two steps.

    The rank copies the records, and then sends `StateCopied`.
    """

    request: int
    snapshot: int
    state: RunState
    partials_path: str = ""
    """File with the tokens of running samples, a block of `trainer_hook.calls.kept`."""
    records: list[Commit] = []
    """Finished groups; leased to the rank."""
    num_left_out: int = 0
    """Finished groups over `Welcome.checkpoint_bytes`."""


class Notice(Message):
    """A temporary degradation; the hook logs it as a warning."""

    text: str


class Progress(Message):
    """Progress of the run, in one line; the hook of rank 0 logs it, the launcher prints it."""

    text: str


class Fatal(Message):
    """The run has failed; every pending and later hook call raises `error`."""

    error: str
    """Name of the error class in `trainer_hook.errors`."""
    text: str
