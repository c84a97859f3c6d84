"""What happened in one launch of a run, folded from its events: groups, steps, updates, lives.

In: events, one after the other. Out: a `History`. Invariant: folding is all that is done; whatever can be
computed from a history is computed by who needs it, and a history that ends anywhere is a valid one.

Times are those of the host's monotonic clock.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fa_rollout.records.events import Event
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
    counts: dict[str, int] = field(default_factory=dict)
    """The hub's last word on its books."""

    def fold(self, event: Event) -> None:
        """Take the next event in."""
        self.last_s = event.t
        handler = _HANDLERS.get(event.event)
        if handler is not None:
            handler(self, event)

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


def histories(events: Iterable[Event]) -> list[History]:
    """Each launch of a folder, oldest first."""
    found: list[History] = []
    for event in events:
        if event.event == "began":
            found.append(_begun(event))
        if found:
            found[-1].fold(event)
    return found


def _begun(event: Event) -> History:
    return History(
        began_s=event.t, run=event.run, time_s=event.time_s, folder=event.folder, config=event.config
    )


# --- the events ------------------------------------------------------------------------------------------


def _issued(history: History, event: Event) -> None:
    for name, attempt in zip(event.groups, event.attempts or [0] * len(event.groups), strict=False):
        group = history.groups.setdefault(name, Group(group=name))
        group.place, group.attempt = "issued", attempt
        group.issued_s, group.dispatched_s = event.t, None


def _dispatched(history: History, event: Event) -> None:
    for name in event.groups:
        if name in history.groups:
            history.groups[name].place, history.groups[name].dispatched_s = "running", event.t


def _committed(history: History, event: Event) -> None:
    group = _group(history, event)
    group.place, group.committed_s, group.reason = "committed", event.t, ""
    group.versions, group.num_bytes = event.versions, event.bytes
    group.prompt_lens, group.response_lens, group.rewards = (
        event.prompt_lens,
        event.response_lens,
        event.rewards,
    )


def _ended_untrained(history: History, event: Event) -> None:
    group = _group(history, event)
    group.place, group.reason, group.ended_s = event.event, event.reason, event.t


def _returned(history: History, event: Event) -> None:
    if event.group is None:  # a step that no rank trained: its groups make it again
        _back_to_committed(history, event.groups)
        return
    group = _group(history, event)
    group.place, group.reason = "queued", event.reason


def _back_to_committed(history: History, names: list[int]) -> None:
    for name in names:
        if name in history.groups:
            group = history.groups[name]
            group.place, group.step, group.version = "committed", None, None


def _composed(history: History, event: Event) -> None:
    if event.step is None or event.version is None:
        return
    if event.step in history.steps:
        history.lost.append(history.steps[event.step])
    step = Step(step=event.step, version=event.version, groups=event.groups, composed_s=event.t)
    history.steps[event.step] = step
    for name in event.groups:
        if name in history.groups:
            group = history.groups[name]
            group.place, group.step, group.version = "handed", event.step, event.version


def _handed(history: History, event: Event) -> None:
    step = history.steps.get(-1 if event.step is None else event.step)
    if step is not None and event.rank is not None:
        step.ranks[event.rank, event.peer] = Handed(asked_s=event.t - event.waited_s, handed_s=event.t)


def _finished(history: History, event: Event) -> None:
    step = history.steps.get(-1 if event.step is None else event.step)
    part = None if step is None or event.rank is None else step.ranks.get((event.rank, event.peer))
    if part is not None:
        part.finished_s = event.t


def _trained(history: History, event: Event) -> None:
    step = history.steps.get(-1 if event.step is None else event.step)
    if step is not None:
        step.trained_s = event.t
    for name in event.groups:
        if name in history.groups:
            history.groups[name].place, history.groups[name].ended_s = "trained", event.t


def _update(history: History, event: Event) -> None:
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


def _published(history: History, event: Event) -> None:
    if not history.updates or history.updates[-1].ended_s is not None:
        history.updates.append(Update(entering_s=event.t))  # by somebody else than the hook
    update = history.updates[-1]
    update.ended_s, update.version, update.bubble_s = event.t, event.version, event.bubble_s


def _evaluation(history: History, event: Event) -> None:
    history.evaluations[event.number] = Evaluation(
        number=event.number, began_s=event.t, dataset=event.dataset
    )


def _evaluated(history: History, event: Event) -> None:
    evaluation = history.evaluations.get(event.number)
    if evaluation is not None:
        evaluation.ended_s, evaluation.num_prompts = event.t, event.prompts
        evaluation.error = event.error


def _generator_started(history: History, event: Event) -> None:
    history.lives.append(GeneratorLife(incarnation=event.incarnation, started_s=event.t))


def _generator_ready(history: History, event: Event) -> None:
    if history.lives:
        life = history.lives[-1]
        life.ready_s, life.engines, life.concurrency = event.t, event.engines, event.concurrency


def _generator_died(history: History, event: Event) -> None:
    if history.lives:
        history.lives[-1].ended_s, history.lives[-1].how = event.t, event.how
    for name in event.requeued:
        if name in history.groups:
            history.groups[name].place = "queued"
            history.groups[name].reason = f"the generator ended {event.how}"


def _attached(history: History, event: Event) -> None:
    history.marks.append((event.t, f"rank {event.rank} attached"))


def _left(history: History, event: Event) -> None:
    history.marks.append((event.t, f"rank {event.rank} left"))
    history.left_s.append(event.t)
    _back_to_committed(history, event.taken_back)


def _loaded(history: History, event: Event) -> None:
    history.marks.append((event.t, f"a checkpoint of step {event.step} was loaded"))
    _back_to_committed(history, event.unfinished)
    for name in set(event.unfinished) - set(event.kept):
        if name in history.groups:
            history.groups[name].place = "queued"


def _warning(history: History, event: Event) -> None:
    history.warnings.append((event.t, event.text))


def _fatal(history: History, event: Event) -> None:
    history.fatal = f"{event.error}: {event.text}"


def _ended(history: History, event: Event) -> None:
    history.exit_code, history.ending, history.counts = event.exit_code, event.text, event.counts
    if history.lives and history.lives[-1].ended_s is None:
        history.lives[-1].ended_s = event.t


def _group(history: History, event: Event) -> Group:
    name = -1 if event.group is None else event.group
    group = history.groups.setdefault(name, Group(group=name, issued_s=event.t))
    group.attempt = event.attempt
    return group


_HANDLERS = {
    "issued": _issued,
    "dispatched": _dispatched,
    "committed": _committed,
    "filtered": _ended_untrained,
    "failed": _ended_untrained,
    "dropped": _ended_untrained,
    "returned": _returned,
    "composed": _composed,
    "handed": _handed,
    "finished": _finished,
    "trained": _trained,
    "update": _update,
    "published": _published,
    "evaluation": _evaluation,
    "evaluated": _evaluated,
    "generator_started": _generator_started,
    "generator_ready": _generator_ready,
    "generator_died": _generator_died,
    "attached": _attached,
    "left": _left,
    "loaded": _loaded,
    "warning": _warning,
    "fatal": _fatal,
    "ended": _ended,
}
