"""The parts of a run's history: what became of each group, step, update, evaluation, generator.

Times are those of the host's monotonic clock.
"""

from dataclasses import dataclass, field

from fa_rollout.account.figures import StepFigures, UpdateFigures

ENDS = ("trained", "filtered", "failed", "dropped")


@dataclass(slots=True, kw_only=True)
class Group:
    """One prompt group, as far as it came."""

    group: int
    place: str = "issued"
    """issued, running, committed, handed, queued (given back), or one of `ENDS`."""
    attempt: int = 0
    reason: str = ""
    """Why it ended so, or was given back last."""
    kind: str = ""
    """What such reasons are counted by."""
    step: int | None = None
    version: int | None = None
    """That trained it."""
    versions: tuple[int, int] | None = None
    """Oldest and newest that sampled a token of it."""
    issued_s: float = 0.0
    dispatched_s: float | None = None
    """Its first request left."""
    committed_s: float | None = None
    ended_s: float | None = None
    num_bytes: int = 0
    prompt_lens: list[int] = field(default_factory=list)
    response_lens: list[int] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)

    @property
    def staleness(self) -> int | None:
        """Version that trained it minus the oldest that sampled it; None where one is unknown."""
        if self.version is None or self.versions is None or self.versions[0] < 0:
            return None
        return self.version - self.versions[0]


@dataclass(slots=True, kw_only=True)
class Handed:
    """A rank's part of a step."""

    asked_s: float
    handed_s: float
    finished_s: float | None = None


@dataclass(slots=True, kw_only=True)
class Step:
    """One step, from its composition on."""

    step: int
    version: int
    groups: list[int]
    composed_s: float
    ranks: dict[tuple[int, int], Handed] = field(default_factory=dict)
    """By data-parallel rank and peer."""
    trained_s: float | None = None
    figures: StepFigures | None = None
    """Once it is trained."""

    @property
    def asked_s(self) -> float:
        """When the first rank asked."""
        return min((part.asked_s for part in self.ranks.values()), default=self.composed_s)


@dataclass(slots=True, kw_only=True)
class Update:
    """One weight update: ranks enter, the leader writes, engines load."""

    entering_s: float
    version: int | None = None
    open_s: float | None = None
    publishing_s: float | None = None
    ended_s: float | None = None
    figures: UpdateFigures | None = None
    error: str | None = None

    @property
    def bubble_s(self) -> float:
        """How long the engines paused for it."""
        return self.figures.bubble_s if self.figures else 0.0


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """One evaluation beside training."""

    number: int
    began_s: float
    dataset: str | None
    ended_s: float | None = None
    num_prompts: int = 0
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class GeneratorLife:
    """One life of the generator process."""

    incarnation: int
    started_s: float
    ready_s: float | None = None
    ended_s: float | None = None
    how: str = ""
    engines: list[str] = field(default_factory=list)
    concurrency: int = 0
