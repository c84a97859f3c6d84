"""Messages from the hub to the generator."""

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
    """First message to a generator: the state of the ring and the run."""

    incarnation: int
    head: int
    tail: int
    sequence: int
    """First sequence number to use."""
    version: int
    lineage: str
    weights: str | None
    """Folder of the weights of `version`, for engines without them; None: engines have `version`."""
    engines: list[str] = []
    """Engines that the last generator used; empty: those of the configuration."""
    known_engines: bytes = b""
    """From the last generator's `GeneratorReady`."""
    is_streamed: bool = False
    """No file contains the weights of `version`: an engine without them waits for the next update."""
    in_stream: bool = False
    """The last generator exited during a weight stream: engines may have an incomplete version."""
    weights_pending: bool = False
    """It is not confirmed yet that engines have `version`."""
    is_new: bool = False
    """No earlier generator was ready: the engines' weights are unknown."""
    lineages: list[str] = []
    """Earlier lineages of this run, whose labels engines may still report."""
    step: int = 0
    """With fed prompts: the last step that the launcher announced."""
    payload: bytes = b""
    """The launcher's data for a plugged-in generator."""


class Start(Message):
    """Credits: groups to roll out, oldest first, requeued groups before new ones."""

    groups: list[Assignment]
    payloads: list[bytes] = []
    """With fed prompts: the payload of each of `groups`."""
    kept_path: str = ""
    kept: list[KeptEntry] = []
    """Stored tokens of some of `groups` in that file, from a checkpoint."""


class SavePartials(Message):
    """Write the tokens of running samples to a file; answered by `PartialsSaved`."""

    number: int
    path: str
    limit_bytes: int
    interrupt_s: float
    """Longest wait for aborted requests to return their tokens; 0: do not abort."""


class Tail(Message):
    """The ring is free up to this position; idempotent."""

    position: int


class Drop(Message):
    """Drop these groups, queued or running; answered by one `Settled` each."""

    groups: list[int]
    reason: str


class EndEndless(Message):
    """The trainer waits too long: end generate functions with endless turns; idempotent."""

    limit_s: float
    """Only functions that have run longer than this."""
    rule: str
    """The rule that they broke, for the message."""


class AbortRunning(Message):
    """Abort running requests of these groups (None: all); they continue by the partial-rollout policy."""

    groups: list[int] | None
    member: int | None = None
    """Only this sample of each group."""


class RunEvaluation(Message):
    """Evaluate alongside training; answered by one `Evaluated` per prompt, then `EvaluationEnded`."""

    evaluation: int
    order: EvaluationOrder
    done: list[int] = []
    """Prompts that an earlier generator has finished."""


class DropEvaluation(Message):
    """Cancel this evaluation."""

    evaluation: int


class PauseEngines(Message):
    """Pause every engine for at most `lease_s`; answered by `EnginesPaused`."""

    lease_s: float


class PublishWeights(Message):
    """Load weights (path None: already there), label them, continue; answered by `WeightsPublished`."""

    version: int
    lineage: str
    path: str | None
    is_streamed: bool = False
    """The engines received them by `EngineStage`s."""
    probes: list[Probe] = []
    """Sample values of the files, to compare with the engines'."""
    scored: Scored | None = None
    """Check for engines that cannot report values, and for streamed weights."""


class EngineStage(Message):
    """A stage of a weight stream; answered by `StageDone` or `StageFailed` with the same number."""

    number: int
    stage: Stage
    version: int
    """The stream's version."""
    lineage: str
    lease_s: float
    """Paused engines continue after this long without another stage."""


class ContinueEngines(Message):
    """Continue with the engines' current weights."""
