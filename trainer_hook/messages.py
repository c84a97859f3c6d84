"""The control messages: everything that hub, generator, trainer ranks and launcher say to one another.

Tagged msgpack structs. `encode` and `decode` are the only way on and off the wire; what does not decode is
refused as a `ChannelError`, never guessed at. Sections are named by direction. A message that carries
`request` is answered by exactly one message that carries the same number.
"""

# mypy: disable-error-code="misc"
# msgspec hands `frozen` and `kw_only` down to subclasses; the dataclass protocol that mypy knows does not.

from enum import StrEnum
from typing import Any

import msgspec

from shm.errors import ChannelError
from trainer_hook.record import ExtraColumn

PROTOCOL = 1
"""Raised with every incompatible change of a message or of the record schema."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Root of all control messages."""


# --- both ways -----------------------------------------------------------------------------------------


class Ping(Message):
    """Liveness; answered by `Pong` with the same number."""

    number: int


class Pong(Message):
    number: int


class Stop(Message):
    """End: take no new work, drain within the grace, exit."""

    grace_s: float
    reason: str


# --- anyone -> hub -------------------------------------------------------------------------------------


class Hello(Message):
    """First message on a connection to the hub."""

    protocol: int
    run: str
    token: str
    role: str
    """`rank` or `observer`."""
    pid: int
    schema: int
    """`schema_fingerprint()` of the attaching side, without a run's extra columns."""
    dp_rank: int = 0
    dp_size: int = 1
    peer: int = 0
    """Index among the processes of one dp_rank (tensor, context parallel); they get the same samples."""
    num_peers: int = 1


class Welcome(Message):
    """Answer to `Hello`; the ring's descriptor travels with it."""

    run: str
    attach: int
    """Number of this attachment."""
    ring_bytes: int
    step: int
    """Next step of this run to be trained."""
    version: int
    lineage: str
    groups_per_step: int
    samples_per_group: int
    update_interval: int
    num_steps: int
    weights_dir: str
    """Folder that this run's weight files go to."""
    stall_s: float
    """Longest wait of a rank for a batch before the hub names who waits for whom."""
    columns: list[ExtraColumn] = []
    """What this run's records hold beyond the schema that all runs have."""


class Refused(Message, kw_only=True):
    """Answer to a `Hello` or a request that cannot be served."""

    request: int = 0
    error: str
    """Name of the error class in `shm.errors` or `trainer_hook.errors`."""
    text: str


# --- rank -> hub ---------------------------------------------------------------------------------------


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
    """Folder of safetensors files for the engines to load; None when the trainer pushed by hand."""


class UpdatePause(Message):
    """The leader asks that the engines stand still, to push by hand; answered by `Reply`."""

    request: int


class UpdateCancel(Message):
    """The body of the update raised: engines go on with the old version."""

    request: int
    text: str


class Abort(Message):
    """Abort running work: all of it, one group or one sample of it, or groups begun before a version."""

    request: int
    group: int | None = None
    member: int | None = None
    older_than: int | None = None


class Hold(Message):
    """Stop (`held`) or go on issuing groups; running ones finish. Answered by `Reply`."""

    request: int
    held: bool


class Query(Message):
    """Ask for `statistics` or `state`; answered by `Reply` with a value."""

    request: int
    what: str


class RunState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run's part of a trainer's checkpoint: what `Query("state")` answers and `LoadState` brings back."""

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
    data: str = ""
    """The data and its order, in words: group ids have a meaning only with them."""


class LoadState(Message):
    """Give the run the state of a checkpoint before its first batch; answered by `Reply`."""

    request: int
    state: dict[str, Any]


class EvaluationPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that an evaluation brings along."""

    prompt: str | list[dict[str, Any]]
    label: Any = None
    metadata: dict[str, Any] = {}


class EvaluationOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What to evaluate: prompts, or a data set by name or path; neither: the one that is configured."""

    prompts: list[EvaluationPrompt] | None = None
    dataset: str | None = None
    samples_per_prompt: int | None = None
    sampling: dict[str, Any] = {}
    """Keys of the configured sampling that differ."""


class Evaluate(Message):
    """Begin an evaluation; answered by `Reply` with its number."""

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


# --- launcher -> hub, where the launcher feeds the prompts ----------------------------------------------


class Feed(Message):
    """Prompts of further groups, in order: the n-th payload of a run is group n. Opaque to the hub."""

    payloads: list[bytes]


class Announce(Message):
    """The launcher begins a step; somebody else gives the engines their weights.

    Passed on to the generator.
    """

    step: int
    """By the launcher's own count."""
    version: int
    """That trains the step's batch, by the hub's count: what a publication would have told."""
    held: int
    """That engines hold now, by their labels."""


# --- hub -> rank ---------------------------------------------------------------------------------------


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
    reward_mean: float
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


class UpdateDone(Message):
    request: int
    version: int
    bubble_s: float
    """Time the engines stood still."""


class EvaluationPart(Message):
    """Some prompts of an evaluation, each once, in the order of their ends."""

    request: int
    results: list[bytes]
    """Each an encoded `trainer_hook.evaluation.EvaluatedPrompt`."""
    num_prompts: int
    """In all; 0 while that is unknown."""
    is_over: bool
    """No part follows."""


class Reply(Message):
    request: int
    value: Any = None


class Notice(Message):
    """Something degraded that repairs itself; the hook logs it as a warning."""

    text: str


class Fatal(Message):
    """The run is given up; every pending and later hook call raises `error`."""

    error: str
    """Name of the error class in `trainer_hook.errors`."""
    text: str


# --- hub -> generator ----------------------------------------------------------------------------------


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """One group to roll out."""

    group: int
    attempt: int
    epoch: int
    prompt_index: int


class Resume(Message):
    """First message to a generator: where the ring and the run stand."""

    incarnation: int
    head: int
    tail: int
    sequence: int
    """First sequence number to use."""
    version: int
    lineage: str
    weights: str | None
    """Folder of the weights of `version`, for engines that lack them; None: engines hold `version`."""
    step: int = 0
    """Where prompts are fed: the step that the launcher announced last, by its own count."""
    payload: bytes = b""
    """What the launcher gave the hub for a plugged-in generator."""


class Start(Message):
    """Credits: groups to roll out, oldest first, requeued ones ahead of new ones."""

    groups: list[Assignment]
    payloads: list[bytes] = []
    """Where prompts are fed: what was fed for each of `groups`, as it came."""


class Tail(Message):
    """The ring is free up to this position; idempotent."""

    position: int


class Drop(Message):
    """Forget these groups wherever they stand (queued or running); answered by one `Settled` each."""

    groups: list[int]
    reason: str


class AbortRunning(Message):
    """Abort the running requests of these groups (None: all); they go on by the partial-rollout policy."""

    groups: list[int] | None
    member: int | None = None
    """Of each group this sample alone."""


class RunEvaluation(Message):
    """Evaluate beside the training stream; answered by one `Evaluated` a prompt, then `EvaluationEnded`."""

    evaluation: int
    order: EvaluationOrder
    done: list[int] = []
    """Prompts that an earlier life of the generator has answered for."""


class DropEvaluation(Message):
    """Nobody waits for this evaluation any more."""

    evaluation: int


class PauseEngines(Message):
    """Pause every engine for at most `lease_s`; answered by `EnginesPaused`."""

    lease_s: float


class PublishWeights(Message):
    """Load weights (path None: already there), label them, go on; answered by `WeightsPublished`."""

    version: int
    lineage: str
    path: str | None


class ContinueEngines(Message):
    """Go on with the weights that the engines have."""


# --- generator -> hub ----------------------------------------------------------------------------------


class GeneratorReady(Message):
    """The data is read, the reward is loaded, the engines answer."""

    incarnation: int
    num_prompts: int
    engines: list[str]
    spans: bool
    """Engines tell the version of every token."""
    concurrency: int
    """Samples that the engines take at once."""


class Dispatched(Message):
    """The first sample of each group left for an engine, under this version."""

    groups: list[int]
    version: int


class Commit(Message):
    """A group is whole and in the ring. The hub's receipt of this message is the commit."""

    incarnation: int
    sequence: int
    position: int
    length: int
    lowest_open: int
    """Ring position of the oldest open claim, or the head: all below is committed or a hole."""
    group: int
    attempt: int
    oldest_version: int
    newest_version: int
    prompt_lens: list[int]
    response_lens: list[int]
    loss_lens: list[int]
    spans: list[list[tuple[int, int, int]]]
    """Per sample, its version spans as (version, end, loss tokens in it): what the `mask` policy needs."""
    rewards: list[float]
    payload: bytes = b""
    """Where prompts are fed: passed on to the launcher."""


class Settlement(StrEnum):
    """How a group ends that never becomes a record."""

    FILTERED = "filtered"
    FAILED = "failed"
    DROPPED = "dropped"
    RETURNED = "returned"
    """Given back untouched: it will be issued again."""


class Settled(Message):
    group: int
    attempt: int
    outcome: Settlement
    reason: str
    mean_response_len: float = 0.0
    payload: bytes = b""
    """Where prompts are fed: passed on to the launcher."""


class Evaluated(Message):
    """One prompt of an evaluation, with its samples or with why it has none."""

    evaluation: int
    index: int
    num_prompts: int
    result: bytes


class EvaluationEnded(Message):
    """Every prompt was answered for; or none will be, for the reason in `error`."""

    evaluation: int
    error: str | None = None


class EnginesPaused(Message):
    pass


class WeightsPublished(Message):
    version: int
    bubble_s: float


class UpdateFailed(Message):
    """The engines could not be paused or could not load the weights; they go on with the old ones."""

    text: str


class Warned(Message):
    text: str


class GaveUp(Message):
    """The generator cannot go on: another life would end the same way."""

    error: str
    text: str
    """Exception and traceback."""


class Pulse(Message):
    """Once a second: the loop is alive, and its figures."""

    num_queued: int
    num_running: int
    """Groups begun and not answered, those that wait for the ring included."""
    num_waiting_for_ring: int
    tokens_per_s: float
    loop_gap_ms: float
    figures: dict[str, float] = {}


# --- hub -> launcher -----------------------------------------------------------------------------------


class HubReady(Message):
    """The hub listens: what a trainer needs in its environment."""

    address: str
    run: str
    pid: int


class Wanted(Message):
    """Prompts that the run can use by now, counted from its start; it only grows."""

    num_groups: int


class Enclosed(Message):
    """What the generator sent along with the record of a group that now waits for the trainer."""

    group: int
    attempt: int
    payload: bytes


class Departed(Message):
    """A fed group ended without being trained: filtered, failed or dropped."""

    group: int
    outcome: Settlement
    reason: str
    payload: bytes = b""


class RunEnded(Message):
    """Last message of the hub: how the run ended and its books."""

    exit_code: int
    text: str
    counts: dict[str, int]


def _all_messages() -> tuple[type[Message], ...]:
    return tuple(Message.__subclasses__())


_ENCODER = msgspec.msgpack.Encoder()
_decoder: "msgspec.msgpack.Decoder[Message] | None" = None


def encode(message: Message) -> bytes:
    """Message to bytes, without the channel's length prefix."""
    return _ENCODER.encode(message)


def decode(payload: bytes | bytearray | memoryview) -> Message:
    """Bytes to a message.

    Raises:
        ChannelError: the bytes are no message of this protocol.
    """
    global _decoder
    if _decoder is None:
        union = _all_messages()[0]
        for kind in _all_messages()[1:]:
            union = union | kind  # type: ignore[assignment]
        _decoder = msgspec.msgpack.Decoder(union)
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, ValueError) as error:
        raise ChannelError(
            f"a control message must be one of protocol {PROTOCOL}; found {len(payload)} bytes that are not "
            f"({error}); the peer is of another release or is no part of fa_rollout"
        ) from error
