"""Where a run stands: what the hub answers to `Query("snapshot")`, and each line of `metrics.jsonl`.

Plain data, the same for `top`, every metrics sink and the report. Names are kept: what a later release adds
comes as a further field with a default.

Counts only grow within one life of the hub (`_total` in the metrics); ages are seconds before `time_s`.
"""

# mypy: disable-error-code="misc"
# msgspec hands `frozen` and `kw_only` down to subclasses; the dataclass protocol that mypy knows does not.

from enum import StrEnum

from fa_rollout.account.figures import SnapshotPart, StepFigures, TimeSpent, UpdateFigures
from trainer_hook.messages.from_generator import EngineFigures, Lingering

STALENESS_LIMIT = "the staleness limit"
RING_SPACE = "ring space"
"""Names of two limits on new groups, see `GroupFigures.limit`."""


class RunPhase(StrEnum):
    """The state of the run."""

    STARTING = "starting"
    """The generator has not read the data yet, or cannot reach the engines."""
    RUNNING = "running"
    ENDING = "ending"
    """No further step starts."""
    GIVEN_UP = "given_up"


class TrainerPhase(StrEnum):
    """What the trainer, or one rank, is doing now."""

    ABSENT = "absent"
    """No rank is attached."""
    ATTACHING = "attaching"
    """Some ranks are attached, others not yet."""
    WAITING = "waiting"
    """All ranks are in `next_batch`: the trainer could compute, and has no data."""
    WAITING_FOR_RANKS = "waiting_for_ranks"
    """In `next_batch` or `update_weights`, while a slower rank has not called it yet."""
    TRAINING = "training"
    """Inside the block of a batch; of the trainer: at least one rank is."""
    UPDATING = "updating"
    """In `update_weights`."""
    OUTSIDE = "outside"
    """In none of these: between two calls of the hook, to save or to evaluate."""


class RunFigures(SnapshotPart):
    """The run's configuration and uptime."""

    name: str
    phase: RunPhase
    uptime_s: float
    """Since the hub started."""
    step: int
    """The next step to compose: lower ones are trained, or the ranks are training them."""
    num_trained: int
    """Steps that every rank has trained, including those before a checkpoint."""
    version: int
    """Published version."""
    lineage: str
    num_steps: int
    groups_per_step: int
    samples_per_group: int
    update_interval: int
    staleness: int
    """The bound."""
    staleness_policy: str
    ending: str | None = None
    """Why it ends, or failed."""


class RankFigures(SnapshotPart):
    """One trainer process."""

    dp_rank: int
    peer: int
    pid: int
    phase: TrainerPhase
    since_s: float
    """Time in this phase."""
    step: int | None = None
    """That it is in."""
    num_leases: int = 0


class TrainerFigures(SnapshotPart):
    """All ranks together."""

    phase: TrainerPhase
    since_s: float
    num_missing: int
    """Ranks that are still to attach."""
    ranks: list[RankFigures]
    first_wait_s: float
    """Until the first batch: start-up, and filling the pipeline. Not in the two that follow."""
    spent: TimeSpent
    """Since the first batch."""
    recent: TimeSpent
    """Over the last steps: at least half a minute, and at least five steps if there are five."""
    in_update: str = "idle"
    """How far the weight update is: `idle`, `entering`, `open` (ranks write), `publishing` (engines load)."""


class GroupFigures(SnapshotPart):
    """Prompt groups by state; `taken` is the sum of all others."""

    taken: int = 0
    queued: int = 0
    """Returned, to be issued again."""
    issued: int = 0
    """The generator has them, no engine yet."""
    running: int = 0
    committed: int = 0
    """In the ring, ready for the trainer."""
    handed: int = 0
    """Handed to the trainer."""
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    dropped: int = 0
    credits: int = 0
    """That the limits allow to start now; 0 is the rule, since each is used at once."""
    limit: str = ""
    """What keeps further groups from starting, in words; empty if nothing does."""


class GeneratorFigures(SnapshotPart):
    """The generator process; all zero while none is running."""

    is_up: bool = False
    num_restarts: int = 0
    pulse_age_s: float | None = None
    """Since its last report; None: no report yet."""
    num_queued: int = 0
    """Groups that wait for a slot at the engines."""
    num_running: int = 0
    num_waiting_for_ring: int = 0
    """Finished groups without room in the ring."""
    in_flight: int = 0
    """Requests at engines."""
    waiting_for_engines: int = 0
    """Requests without a slot."""
    capacity: int = 0
    """Samples that engines run at once."""
    load: float | None = None
    """Share of the capacity in use, mean of the last half minute."""
    busy: float | None = None
    """Share of the tokens per second that the engines can make, mean of the last half minute: measured by how
    an answer's speed falls with the number of requests; share of slots where that is not known yet."""
    is_paused: bool = False
    """Engines are paused for a weight update."""
    rewards_in_progress: int = 0
    rewards_failed: int = 0
    evaluations: int = 0
    tokens_total: int = 0
    """Sampled, over all restarts."""
    requests_total: int = 0
    aborts_total: int = 0
    restarts_total: int = 0
    """Answers that were restarted from the prompt."""
    discarded_tokens_total: int = 0
    tokens_per_s: float = 0.0
    """Tokens of answers that came back, mean of the last half minute."""
    loop_gap_ms: float = 0.0
    """Longest time its event loop was blocked in the last second."""


class EngineState(SnapshotPart):
    """One engine, or the router."""

    url: str
    health: str
    """`ok`, `paused`, `narrowed` (it was overloaded and gets less), `failing` (it answers nothing but errors,
    such as 503, and is asked again), `out` (it failed, and is probed,
    or its process has ended)."""
    now: EngineFigures
    tokens_per_s: float = 0.0

    @property
    def complaint(self) -> str:
        """Its address and its last error."""
        return f"{self.url}: {self.now.last_error or 'no answer'}"


class RingFigures(SnapshotPart):
    """The shared memory."""

    bytes: int
    span_bytes: int
    """From the oldest record to the newest: the part that cannot be overwritten."""
    live_bytes: int
    watermark_bytes: int
    """Largest span so far."""
    num_records: int
    oldest_lease_s: float
    """Age of the oldest lease; 0 without one."""
    oldest_lease_of: str | None = None
    """Which rank holds it."""
    mean_record_bytes: float = 0.0
    num_refused: int = 0


class StalenessFigures(SnapshotPart):
    """Staleness of unfinished groups if trained now, in versions; None: there are none, or unknown."""

    running_max: int | None = None
    ready_max: int | None = None
    trained_max: int | None = None
    """Of all steps of this life."""


class Totals(SnapshotPart):
    """Totals since the hub started."""

    steps: int = 0
    samples: int = 0
    trained_tokens: int = 0
    """Response tokens of trained steps."""
    dropped_tokens: float = 0.0
    updates: int = 0
    bubble_s: float = 0.0
    warnings: int = 0


class Wait(SnapshotPart):
    """One wait: who waits for what."""

    who: str
    what: str
    since_s: float


class WarningText(SnapshotPart):
    """A degraded state that repairs itself."""

    text: str
    age_s: float
    """Since it was last reported."""
    count: int = 1


class Reason(SnapshotPart):
    """Why groups ended without being trained."""

    outcome: str
    """`failed`, `filtered`, `dropped`."""
    reason: str
    """Its first words."""
    count: int
    last: str
    """The latest one in full."""
    age_s: float


class Snapshot(SnapshotPart):
    """The whole run."""

    time_s: float
    """Unix time."""
    run: RunFigures
    trainer: TrainerFigures
    groups: GroupFigures
    generator: GeneratorFigures
    engines: list[EngineState]
    ring: RingFigures
    staleness: StalenessFigures
    totals: Totals
    steps: list[StepFigures] = []
    """The latest, oldest first. A line of metrics.jsonl has those since the previous line."""
    updates: list[UpdateFigures] = []
    """The latest, oldest first; as `steps`."""
    waits: list[Wait] = []
    slowest: list[Lingering] = []
    """Groups and requests that take longest, oldest first."""
    reasons: list[Reason] = []
    warnings: list[WarningText] = []
    """The latest last."""

    @property
    def engines_out(self) -> list[EngineState]:
        """Engines that get no requests, or answer with errors only."""
        return [engine for engine in self.engines if engine.health in ("out", "failing")]
