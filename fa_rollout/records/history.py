"""What happened in one launch of a run, folded from its events: groups, steps, updates, lives.

In: events, one after the other. Out: a `History`. Invariant: folding is all that is done; whatever can be
computed from a history is computed by who needs it, and a history that ends anywhere is a valid one.

Times are those of the host's monotonic clock.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any

from fa_rollout.account import events
from fa_rollout.account.events import Event
from fa_rollout.account.figures import TimeSpent
from fa_rollout.records.story import ENDS, Evaluation, GeneratorLife, Group, Handed, Step, Update


@dataclass(slots=True, kw_only=True)
class History:
    """One launch."""

    run: str = ""
    began_s: float = 0.0
    time_s: float | None = None
    """Unix time of `began_s`."""
    last_s: float = 0.0
    """Of the latest event."""
    folder: str = ""
    """That paths of the configuration are relative to."""
    config: dict[str, Any] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)
    lost: list[Step] = field(default_factory=list)
    """Steps that were composed again, since they were given back or a checkpoint was loaded."""
    updates: list[Update] = field(default_factory=list)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    lives: list[GeneratorLife] = field(default_factory=list)
    warnings: list[tuple[float, str]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    """Ranks that came and left, checkpoints that were loaded."""
    left_s: list[float] = field(default_factory=list)
    """When a rank left: what comes after is another life of the trainer, or the end."""
    fatal: str | None = None
    exit_code: int | None = None
    """None while it runs, or where the hub did not live to tell."""
    ending: str = ""
    spent: TimeSpent | None = None
    """The trainer's time since its first batch; None before the end."""
    counts: dict[str, int] = field(default_factory=dict)
    """The hub's last word on its books."""

    def fold(self, event: Event) -> None:
        """Take the next event in."""
        self.last_s = event.t
        _take(event, self)

    def has_left(self, after_s: float, before_s: float) -> bool:
        """Whether a rank left between two times."""
        return any(after_s < time_s <= before_s for time_s in self.left_s)

    @property
    def books(self) -> dict[str, int]:
        """The hub's own at the end; before that, the same counted from the events."""
        if self.counts:
            return self.counts
        places = Counter(group.place for group in self.groups.values())
        ended = {name: places[name] for name in ENDS}
        return {"taken": len(self.groups), **ended, "returned": len(self.groups) - sum(ended.values())}


def histories(log: Iterable[Event]) -> list[History]:
    """Each launch of a folder, oldest first."""
    found: list[History] = []
    for event in log:
        if isinstance(event, events.HubBegan):
            found.append(_begun(event))
        if found:
            found[-1].fold(event)
    return found


def _begun(event: events.HubBegan) -> History:
    return History(
        began_s=event.t, run=event.run, time_s=event.time_s, folder=event.folder, config=event.config
    )


# --- the events ------------------------------------------------------------------------------------------


@singledispatch
def _take(event: Event, history: History) -> None:
    """An event that says nothing here."""


@_take.register
def _issued(event: events.GroupsIssued, history: History) -> None:
    for name, attempt in zip(event.groups, event.attempts, strict=True):
        group = history.groups.setdefault(name, Group(group=name))
        group.place, group.attempt = "issued", attempt
        group.issued_s, group.dispatched_s = event.t, None


@_take.register
def _dispatched(event: events.GroupsDispatched, history: History) -> None:
    for name in event.groups:
        if name in history.groups:
            history.groups[name].place, history.groups[name].dispatched_s = "running", event.t


@_take.register
def _committed(event: events.GroupCommitted, history: History) -> None:
    group = _group(history, event)
    group.place, group.committed_s, group.reason = "committed", event.t, ""
    group.versions, group.num_bytes = event.versions, event.bytes
    group.prompt_lens, group.response_lens, group.rewards = (
        event.prompt_lens,
        event.response_lens,
        event.rewards,
    )


@_take.register
def _ended_untrained(event: events.GroupLost, history: History) -> None:
    group = _group(history, event)
    group.place, group.reason, group.kind, group.ended_s = event.outcome, event.reason, event.kind, event.t


@_take.register
def _returned(event: events.GroupReturned, history: History) -> None:
    group = _group(history, event)
    group.place, group.reason = "queued", event.reason


@_take.register
def _step_returned(event: events.StepReturned, history: History) -> None:
    _back_to_committed(history, event.groups)


def _back_to_committed(history: History, names: list[int]) -> None:
    for name in names:
        if name in history.groups:
            group = history.groups[name]
            group.place, group.step, group.version = "committed", None, None


@_take.register
def _composed(event: events.StepComposed, history: History) -> None:
    if event.step in history.steps:
        history.lost.append(history.steps[event.step])
    step = Step(step=event.step, version=event.version, groups=event.groups, composed_s=event.t)
    history.steps[event.step] = step
    for name in event.groups:
        if name in history.groups:
            group = history.groups[name]
            group.place, group.step, group.version = "handed", event.step, event.version


@_take.register
def _handed(event: events.PartHanded, history: History) -> None:
    step = history.steps.get(event.step)
    if step is not None:
        step.ranks[event.rank, event.peer] = Handed(asked_s=event.t - event.waited_s, handed_s=event.t)


@_take.register
def _finished(event: events.PartFinished, history: History) -> None:
    step = history.steps.get(event.step)
    part = None if step is None else step.ranks.get((event.rank, event.peer))
    if part is not None:
        part.finished_s = event.t


@_take.register
def _trained(event: events.StepTrained, history: History) -> None:
    step = history.steps.get(event.step)
    if step is not None:
        step.trained_s, step.figures = event.t, event.figures
    for name in event.groups:
        if name in history.groups:
            history.groups[name].place, history.groups[name].ended_s = "trained", event.t


@_take.register
def _update(event: events.UpdateMoved, history: History) -> None:
    if event.phase == "entering":
        history.updates.append(Update(entering_s=event.t))
    elif history.updates:
        update = history.updates[-1]
        if event.phase == "open":
            update.open_s, update.version = event.t, event.version
        elif event.phase == "publishing":
            update.publishing_s = event.t
        elif event.phase == "failed":
            update.ended_s, update.error = event.t, event.text


@_take.register
def _published(event: events.VersionPublished, history: History) -> None:
    if not history.updates or history.updates[-1].ended_s is not None:
        history.updates.append(Update(entering_s=event.t))  # by somebody else than the hook
    update = history.updates[-1]
    update.ended_s, update.version, update.figures = event.t, event.version, event.figures


@_take.register
def _evaluation(event: events.EvaluationBegan, history: History) -> None:
    history.evaluations[event.number] = Evaluation(
        number=event.number, began_s=event.t, dataset=event.dataset
    )


@_take.register
def _evaluated(event: events.EvaluationFinished, history: History) -> None:
    evaluation = history.evaluations.get(event.number)
    if evaluation is not None:
        evaluation.ended_s, evaluation.num_prompts = event.t, event.prompts
        evaluation.error = event.error


@_take.register
def _generator_started(event: events.GeneratorStarted, history: History) -> None:
    history.lives.append(GeneratorLife(incarnation=event.incarnation, started_s=event.t))


@_take.register
def _generator_ready(event: events.GeneratorOpened, history: History) -> None:
    if history.lives:
        life = history.lives[-1]
        life.ready_s, life.engines, life.concurrency = event.t, event.engines, event.concurrency


@_take.register
def _generator_died(event: events.GeneratorDied, history: History) -> None:
    if history.lives:
        history.lives[-1].ended_s, history.lives[-1].how = event.t, event.how
    for name in event.requeued:
        if name in history.groups:
            history.groups[name].place = "queued"
            history.groups[name].reason = f"the generator ended {event.how}"


@_take.register
def _attached(event: events.RankAttached, history: History) -> None:
    history.marks.append((event.t, f"rank {event.rank} attached"))


@_take.register
def _left(event: events.RankLeft, history: History) -> None:
    history.marks.append((event.t, f"rank {event.rank} left"))
    history.left_s.append(event.t)


@_take.register
def _loaded(event: events.StateRestored, history: History) -> None:
    history.marks.append((event.t, f"a checkpoint of step {event.step} was loaded"))
    _back_to_committed(history, event.unfinished)
    for name in set(event.unfinished) - set(event.kept):
        if name in history.groups:
            history.groups[name].place = "queued"


@_take.register
def _warning(event: events.WarningLogged, history: History) -> None:
    history.warnings.append((event.t, event.text))


@_take.register
def _fatal(event: events.RunFailed, history: History) -> None:
    history.fatal = f"{event.error}: {event.text}"


@_take.register
def _ended(event: events.HubEnded, history: History) -> None:
    history.exit_code, history.ending, history.counts = event.exit_code, event.text, event.counts
    history.spent = event.spent
    if history.lives and history.lives[-1].ended_s is None:
        history.lives[-1].ended_s = event.t


def _group(history: History, event: events.GroupRecorded | events.GroupSettled) -> Group:
    group = history.groups.setdefault(event.group, Group(group=event.group, issued_s=event.t))
    group.attempt = event.attempt
    return group
