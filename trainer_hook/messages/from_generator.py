"""What the generator says to the hub."""

from enum import StrEnum

import msgspec

from trainer_hook.messages.base import Message
from trainer_hook.messages.streaming import Audience


class GeneratorReady(Message):
    """The data is read, the reward is loaded, the engines answer."""

    incarnation: int
    num_prompts: int
    engines: list[str]
    spans: bool
    """Engines tell the version of every token."""
    concurrency: int
    """Samples that the engines take at once."""
    known_engines: bytes = b""
    """What was found out about them, for the next life; the hub does not read it."""
    first_weights: str | None = None
    """Folder of the weights that the engines started with, where all of them tell the same."""
    strangers: list[str] = []
    """Engines that hold other weights than those of their start or this run's, and what they report."""


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
    rewards: list[float | None]
    """By sample; None for one that is not trained, and does not count."""
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


class StageDone(Message):
    """Every engine that takes part has taken this step of a stream."""

    number: int
    audience: Audience | None = None
    """Of `OpenStream` alone."""


class StageFailed(Message):
    """A step of a stream went wrong; what the engines hold is no version, so that they get no requests."""

    number: int
    text: str
    may_retry: bool
    """An engine was lost: a stream to the others may work."""


class PartialsSaved(Message):
    """The file that `SavePartials` asked for is there, or could not be written."""

    number: int
    num_groups: int
    num_left_out: int
    """Groups for which there was no room."""


class Warned(Message):
    text: str


class GaveUp(Message):
    """The generator cannot go on: another life would end the same way."""

    error: str
    text: str
    """What the user has to change."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast answers came beside about so many others; sums over their tokens."""

    tokens: float
    beside: float
    """Requests at the engine, the answer's own included, mean over its time; times its tokens."""
    spent_s: float


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, or the router, as the generator sees it."""

    url: str
    in_flight: int
    allowed: int
    """Requests that it may hold now; less than `capacity` after an overload or an outage."""
    capacity: int
    paces: list[Pace] = []
    """By load."""
    is_out: bool = False
    """Its circuit is open: it gets no request, and is probed."""
    num_done: int = 0
    num_aborted: int = 0
    num_tokens: int = 0
    failures: dict[str, int] = {}
    """Attempts that failed, by class: `transient`, `overload`, `silence`, `permanent`, `invalid`."""
    failing_s: float = 0.0
    """For so long it has answered nothing but errors; 0: its last answer was true."""
    last_error: str = ""
    latency_s: dict[str, float] = {}
    """`p50`, `p90`, `p99` of the latest answers; empty before the first."""
    version: str | None = None
    """Version label of the newest token that it answered with."""


class Lingering(msgspec.Struct, frozen=True, kw_only=True):
    """A group or a request that is among the oldest."""

    name: str
    """`group 12`, or a request's id, which begins with its group."""
    age_s: float
    where: str
    """An engine's address, or what the group is at."""


class Pulse(Message):
    """Once a second: the loop is alive, and what the generator does. Totals count this life of it."""

    num_queued: int = 0
    num_running: int = 0
    """Groups begun and not answered, those that wait for the ring included."""
    num_waiting_for_ring: int = 0
    tokens_per_s: float = 0.0
    loop_gap_ms: float = 0.0
    in_flight: int = 0
    """Requests at engines."""
    waiting_for_engines: int = 0
    """Requests that wait for a slot."""
    oldest_request_s: float = 0.0
    is_paused: bool = False
    """Engines are paused for an update."""
    paused_s: float = 0.0
    """In total."""
    evaluations: int = 0
    """Running."""
    rewards_in_progress: int = 0
    rewards_failed: int = 0
    records: int = 0
    """Written to the ring."""
    requests: int = 0
    tokens: int = 0
    """Sampled."""
    aborts: int = 0
    restarts: int = 0
    discarded_tokens: int = 0
    engines: list[EngineFigures] = []
    slowest: list[Lingering] = []
    """The oldest groups and requests."""
