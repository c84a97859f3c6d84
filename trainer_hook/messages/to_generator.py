"""What the hub says to the generator."""

import msgspec

from trainer_hook.messages.base import Message
from trainer_hook.messages.from_rank import EvaluationOrder, KeptEntry
from trainer_hook.messages.streaming import Probe, Scored, Stage


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
    engines: list[str] = []
    """That the life before asked; empty: those of the configuration."""
    known_engines: bytes = b""
    """Of the `GeneratorReady` of the life before."""
    is_streamed: bool = False
    """No file holds the weights of `version`: an engine that lacks them waits for the next update."""
    in_stream: bool = False
    """A stream of weights was under way when the last life ended: engines may hold what is no version yet."""
    weights_pending: bool = False
    """Nobody has told yet that engines hold `version`."""
    is_new: bool = False
    """No life before was ready: nothing is known of what engines hold."""
    lineages: list[str] = []
    """Of this run, before `lineage`: engines may report labels of them still."""
    step: int = 0
    """Where prompts are fed: the step that the launcher announced last, by its own count."""
    payload: bytes = b""
    """What the launcher gave the hub for a plugged-in generator."""


class Start(Message):
    """Credits: groups to roll out, oldest first, requeued ones ahead of new ones."""

    groups: list[Assignment]
    payloads: list[bytes] = []
    """Where prompts are fed: what was fed for each of `groups`, as it came."""
    kept_path: str = ""
    kept: list[KeptEntry] = []
    """Of some of `groups`, what a checkpoint kept in that file: they need not begin from nothing."""


class SavePartials(Message):
    """Write the tokens that samples under way have to a file; answered by `PartialsSaved`."""

    number: int
    path: str
    limit_bytes: int
    interrupt_s: float
    """Longest wait for running requests to come back aborted with theirs; 0: they are left alone."""


class Tail(Message):
    """The ring is free up to this position; idempotent."""

    position: int


class Drop(Message):
    """Forget these groups wherever they stand (queued or running); answered by one `Settled` each."""

    groups: list[int]
    reason: str


class EndEndless(Message):
    """The trainer waits too long: end generate functions that take turn after turn; idempotent."""

    limit_s: float
    """Only those that have done so for as long."""
    rule: str
    """What they have broken, in words."""


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
    is_streamed: bool = False
    """The engines took them by `EngineStage`s."""
    probes: list[Probe] = []
    """Of the files, for engines to be asked for."""
    scored: Scored | None = None
    """For engines that cannot report these, and for those that a stream went to."""


class EngineStage(Message):
    """A step of a stream of weights; answered by `StageDone` or `StageFailed` with the same number."""

    number: int
    stage: Stage
    version: int
    """That the stream will bring, and its lineage."""
    lineage: str
    lease_s: float
    """Engines that stand still for the stream go on after so long without a further step."""


class ContinueEngines(Message):
    """Go on with the weights that the engines have."""
