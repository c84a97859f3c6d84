"""The run's flow control: what may start, what is ready, which groups make the next step. No I/O.

In: the generator's news and the trainer's steps. Out: assignments, steps, ring positions.
Invariant: the books, the ring's table and the version agree after each call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fa_rollout.account.events import Note
from fa_rollout.config import Config
from fa_rollout.hub.flow import admission, composition
from fa_rollout.hub.flow.ageing import Ageing
from fa_rollout.hub.flow.books import Books, Group
from fa_rollout.hub.flow.kept_groups import Kept
from fa_rollout.hub.flow.meter import Meter
from fa_rollout.hub.flow.replay import Recording
from fa_rollout.hub.flow.stream import Source
from shm import Descriptor, RingTable
from shm.errors import DescriptorRefused
from trainer_hook.messages import Assignment, Commit, KeptEntry, Settled, Settlement

OF_CHECKPOINT = (
    "the engines lack the weights of the checkpoint that was loaded: "
    "call hook.update_weights() once after hook.load_state_dict()"
)
"""Why engines do not hold a version, and what to do."""


@dataclass(slots=True, kw_only=True)
class Step:
    """One batch, from its composition until every rank is done with it."""

    step: int
    version: int
    groups: list[Group]
    last: bool = False
    num_tokens: int = 0
    """Response tokens in the loss."""
    num_bytes: int = 0
    num_samples: int = 0
    rewards: list[float] = field(default_factory=list)
    """Of the samples that are trained."""
    oldest_version: int = 0

    def __post_init__(self) -> None:
        self.sum_up()

    def sum_up(self) -> None:
        """Figures of the groups that it has now."""
        commits = self.commits
        self.num_bytes = sum(commit.length for commit in commits)
        self.num_samples = sum(len(commit.response_lens) for commit in commits)
        self.rewards = [reward for commit in commits for reward in commit.rewards if reward is not None]
        self.oldest_version = min(commit.oldest_version for commit in commits)

    @property
    def reward_mean(self) -> float:
        return sum(self.rewards) / max(1, len(self.rewards))

    @property
    def names(self) -> list[int]:
        """Ids of the groups."""
        return [group.group for group in self.groups]

    @property
    def commits(self) -> list[Commit]:
        """The records' descriptors and sizes."""
        return [group.commit for group in self.groups if group.commit is not None]


class Flow:
    """Books, ring table and version of a run."""

    def __init__(
        self,
        config: Config,
        stream: Source,
        table: RingTable,
        *,
        lineage: str,
        note: Note = lambda event: None,
        recording: Recording | None = None,
    ) -> None:
        """
        Args:
            note: takes what happens to groups here and nowhere else.
            recording: a run whose steps are to be given out again.
        """
        self.recording = recording
        rollout = config.rollout
        groups_per_version = rollout.groups_per_step * rollout.update_interval
        self.config = config
        self.books = Books(stream)
        self.table = table
        self.window = admission.AdmissionWindow(
            staleness=rollout.staleness,
            groups_per_version=groups_per_version,
            groups_per_step=rollout.groups_per_step,
            surplus_groups=rollout.surplus_groups,
        )
        self.rules = composition.Rules(
            policy=rollout.staleness_policy,
            staleness=rollout.staleness,
            groups_per_step=rollout.groups_per_step,
            groups_per_version=groups_per_version,
        )
        self.kept = Kept(self.books, self.rules)
        self.version = 0
        self.lineage = lineage
        self.step = 0
        """Next step to compose."""
        self.handed_since_publication = 0
        self.weights_pending = False
        """The engines do not have the weights of `version` yet."""
        self.lacking = OF_CHECKPOINT
        """Why that is so, and what to do."""
        self.held = False
        self.open_steps: dict[int, Step] = {}
        self._given_back: dict[int, list[int]] = {}
        """Groups of steps that were not trained: they make the same step again."""
        self.meter = Meter()
        self.ageing = Ageing(
            books=self.books,
            table=table,
            rules=self.rules,
            max_attempts=rollout.max_attempts,
            has_surplus=rollout.surplus_groups > 0,
            meter=self.meter,
            note=note,
        )

    # --- starting ---------------------------------------------------------------------------------

    @property
    def num_remaining(self) -> int:
        """Groups that the run still needs beyond those handed over."""
        return max(0, (self.config.rollout.num_steps - self.step) * self.config.rollout.groups_per_step)

    def issue(self) -> list[Assignment]:
        """Groups to start now."""
        if self.held or self.weights_pending:
            return []
        return self.books.take(self.num_credits)

    def head_starts(self, assignments: Sequence[Assignment]) -> list[KeptEntry]:
        """What a checkpoint kept of these groups, as far as it may still be trained."""
        return self.kept.head_starts(assignments, training_version=self._training_version)

    @property
    def num_credits(self) -> int:
        """Groups that the limits allow to start now."""
        return admission.credit(self.window, self._load)

    @property
    def tightest_limit(self) -> str:
        """The limit by which no further group may start now; empty when some may."""
        load = self._load
        limits = admission.limits(self.window, load)
        name = min(limits, key=limits.__getitem__)
        return name if limits[name] <= load.live else ""

    @property
    def _load(self) -> admission.Load:
        return admission.Load(
            live=self.books.counts().live,
            handed_since_publication=self.handed_since_publication,
            remaining=self.num_remaining,
            mean_record_bytes=self.meter.mean_record_bytes,
            ring_bytes=self.config.ring.bytes,
            handed_bytes=sum(step.num_bytes for step in self.open_steps.values()),
        )

    # --- the generator's news ---------------------------------------------------------------------

    def commit(self, message: Commit) -> bool:
        """Take a record in; False when nobody waits for it any more.

        The receipt of the message is the commit: from here on the record outlives the generator.

        Raises:
            DescriptorRefused: the descriptor cannot be right; the group starts again.
        """
        descriptor = Descriptor(
            incarnation=message.incarnation,
            sequence=message.sequence,
            position=message.position,
            length=message.length,
        )
        try:
            self.table.admit(descriptor, message.lowest_open)
        except DescriptorRefused:
            self.meter.num_refused += 1
            self.books.settle(message.group, message.attempt, Settlement.RETURNED)
            raise
        if not self.books.commit(message):
            self.table.discard(message.sequence)
            return False
        self.meter.committed(message.length)
        return True

    def settle(self, message: Settled) -> bool:
        """A group ended without a record; False when nobody waits for it any more.

        Raises:
            TooManyFailures: the configured rate of failures was passed.
        """
        if not self.books.settle(message.group, message.attempt, message.outcome):
            return False
        if message.outcome is Settlement.FAILED:
            self.meter.failed(
                self.config.rollout.max_failure_rate, f"group {message.group}: {message.reason}"
            )
        return True

    def generator_died(self) -> list[Group]:
        """Requeue what the generator held."""
        return self.books.generator_died()

    # --- composing --------------------------------------------------------------------------------

    @property
    def all_composed(self) -> bool:
        """Whether no further step will come: the run's steps are done, or the data is."""
        if self.step >= self.config.rollout.num_steps:
            return True
        if self.books.stream.is_open or self.books.num_left != 0:
            return False
        counts = self.books.counts()
        return not counts.live and not counts.queued

    def compose(self) -> Step | composition.BatchWait:
        """Close the next step, or say what it waits for. Overdue groups are settled on the way."""
        if self.recording is not None:
            return self._compose_as(self.recording)
        self.ageing.settle_overdue(self.version)
        again = self._given_back.pop(self.step, [])
        if again and all(self.books.is_committed(name) for name in again):
            return self._close(again)
        counts = self.books.counts()
        is_over = self.books.num_left == 0 and not self.books.stream.is_open
        more_to_come = bool(counts.running or counts.issued or counts.queued or not is_over)
        decision = composition.compose(
            self.rules,
            version=self.version,
            handed_since_publication=self.handed_since_publication,
            ready=self.ageing.ready(),
            running=self.ageing.running(),
            more_to_come=more_to_come,
        )
        if isinstance(decision, composition.BatchWait):
            return decision
        return self._close(decision.groups)

    def _compose_as(self, recording: Recording) -> Step | composition.BatchWait:
        for group in self.books.committed():
            if group.group not in recording.groups:
                self.ageing.drop(group, "the recorded run did not train it")
        decision = recording.compose(self.step, self.books)
        return decision if isinstance(decision, composition.BatchWait) else self._close(decision.groups)

    def take_hopeless(self) -> list[int]:
        """Groups that the generator is to stop, since no step can train them any more; each sweep once."""
        return self.ageing.take_hopeless(self.version, self._training_version, all_composed=self.all_composed)

    @property
    def _training_version(self) -> int:
        """The version that trains the next step: the present one until it has had all its steps."""
        has_had_all = self.handed_since_publication >= self.rules.groups_per_version
        return self.version + (1 if has_had_all else 0)

    def starved(self) -> str | None:
        """Why no batch can ever close as things stand; None while one can."""
        if self.recording is not None and not self.all_composed:
            obstacle = self.recording.obstacle(self.step, self.books)
            if obstacle is not None:
                return obstacle
        counts = self.books.counts()
        if counts.issued or counts.running or self.held or self.all_composed:
            return None
        if self.weights_pending:
            return self.lacking
        if self.num_credits or counts.committed >= self.rules.groups_per_step or self.books.num_left == 0:
            return None
        interval, staleness = self.config.rollout.update_interval, self.window.staleness
        return (
            f"no group may start: {self.handed_since_publication} groups were handed over since version "
            f"{self.version} was published, and the staleness bound {staleness} allows "
            f"{(staleness + 1) * self.window.groups_per_version}; call hook.update_weights() every "
            f"{interval} steps, or raise rollout.update_interval or rollout.staleness"
        )

    def _close(self, names: Sequence[int]) -> Step:
        groups = [self.books.groups[name] for name in names]
        self.books.hand(names)
        step = Step(step=self.step, version=self.version, groups=groups)
        self.step += 1
        self.handed_since_publication += len(names)
        self.open_steps[step.step] = step
        step.last = self.all_composed
        return step

    # --- the trainer's side -----------------------------------------------------------------------

    def trained(self, step: Step) -> None:
        """Every rank trained the step: its records may leave the ring when their leases end."""
        del self.open_steps[step.step]
        self.meter.trained_tokens += sum(sum(c.response_lens) for c in step.commits)
        self.books.trained(step.names)
        for commit in step.commits:
            self.table.retire(commit.sequence)

    def returned(self, step: Step) -> None:
        """The step was not trained: its groups are given again, by the same number."""
        del self.open_steps[step.step]
        self._given_back[step.step] = step.names
        self.books.take_back(step.names)
        self.handed_since_publication = max(0, self.handed_since_publication - len(step.groups))
        self.step = min(self.step, step.step)

    def published(self, version: int) -> None:
        """A version is in the engines."""
        self.version = version
        self.handed_since_publication = 0
        self.weights_pending = False
