"""Messages from the generator to the hub."""

from enum import StrEnum

import msgspec

from trainer_hook.messages.base import Message
from trainer_hook.messages.streaming import Audience


class GeneratorReady(Message):
    """Data and reward are loaded, and the engines answer."""

    incarnation: int
    num_prompts: int
    engines: list[str]
    spans: bool
    """Engines report the version of every token."""
    concurrency: int
    """Concurrent samples of all engines."""
    known_engines: bytes = b""
    """Findings about the engines for the next generator; opaque to the hub."""
    first_weights: str | None = None
    """Folder of the engines' initial weights, if all engines report the same."""
    strangers: list[str] = []
    """Engines with weights that are neither initial nor of this run, and what they report."""


class Dispatched(Message):
    """The first sample of each group was sent to an engine, at this version."""

    groups: list[int]
    version: int


class Commit(Message):
    """A complete group is in the ring. It is committed when the hub receives this message."""

    incarnation: int
    sequence: int
    position: int
    length: int
    lowest_open: int
    """Ring position of the oldest open claim, or the head: everything below is committed or a hole."""
    group: int
    attempt: int
    oldest_version: int
    newest_version: int
    prompt_lens: list[int]
    response_lens: list[int]
    loss_lens: list[int]
    spans: list[list[tuple[int, int, int]]]
    """Per sample, its version spans as (version, end, loss tokens), for the `mask` policy."""
    rewards: list[float | None]
    """Per sample; None for a sample that is not trained."""
    payload: bytes = b""
    """Forwarded to a launcher that feeds prompts."""


class Settlement(StrEnum):
    """Outcome of a group that does not become a record."""

    FILTERED = "filtered"
    FAILED = "failed"
    DROPPED = "dropped"
    RETURNED = "returned"
    """Returned unstarted: it will be issued again."""


class Settled(Message):
    group: int
    attempt: int
    outcome: Settlement
    reason: str
    mean_response_len: float = 0.0
    payload: bytes = b""
    """Forwarded to a launcher that feeds prompts."""


class Evaluated(Message):
    """One prompt of an evaluation, with its samples or its failure."""

    evaluation: int
    index: int
    num_prompts: int
    result: bytes


class EvaluationEnded(Message):
    """Every prompt is finished; or the evaluation failed with `error`."""

    evaluation: int
    error: str | None = None


class EnginesPaused(Message):
    pass


class WeightsPublished(Message):
    version: int
    bubble_s: float


class UpdateFailed(Message):
    """The engines could not pause or load the weights; they continue with the old weights."""

    text: str


class StageDone(Message):
    """Every participating engine has completed this stage of a stream."""

    number: int
    audience: Audience | None = None
    """Only for `OpenStream`."""


class StageFailed(Message):
    """A stage of a stream failed; the engines hold no valid version and get no requests."""

    number: int
    text: str
    may_retry: bool
    """An engine was lost: a stream to the others may succeed."""


class PartialsSaved(Message):
    """The file of `SavePartials` is written, or could not be written."""

    number: int
    num_groups: int
    num_left_out: int
    """Groups over the limit."""


class Warned(Message):
    text: str


class GaveUp(Message):
    """The generator failed for good: a restart would fail the same way."""

    error: str
    text: str
    """What the user must change."""


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
    """Request limit now; below `capacity` after an overload or an outage."""
    capacity: int
    paces: list[Pace] = []
    """By load."""
    is_out: bool = False
    """Its circuit breaker is open: it is probed and gets no requests."""
    num_done: int = 0
    num_aborted: int = 0
    num_tokens: int = 0
    failures: dict[str, int] = {}
    """Failed attempts by class: `transient`, `overload`, `silence`, `permanent`, `invalid`."""
    failing_s: float = 0.0
    """Time for which all answers were errors; 0: the last answer was valid."""
    last_error: str = ""
    latency_s: dict[str, float] = {}
    """`p50`, `p90`, `p99` of recent answers; empty before the first."""
    version: str | None = None
    """Version label of its newest token."""


class Lingering(msgspec.Struct, frozen=True, kw_only=True):
    """One of the oldest groups or requests."""

    name: str
    """`group 12`, or a request's id, which begins with its group."""
    age_s: float
    where: str
    """An engine's address, or the group's stage."""


class Pulse(Message):
    """Sent every second: the generator's state. Totals count since it started."""

    num_queued: int = 0
    num_running: int = 0
    """Groups started and not finished, including groups that wait for the ring."""
    num_waiting_for_ring: int = 0
    tokens_per_s: float = 0.0
    loop_gap_ms: float = 0.0
    in_flight: int = 0
    """Requests at engines."""
    waiting_for_engines: int = 0
    """Requests waiting for a slot."""
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
