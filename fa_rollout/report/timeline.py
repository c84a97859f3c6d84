"""Who did what when: spans of trainer, updates, engines, generator, evaluations. Pure.

In: a history. Out: spans in lanes, the same for the page and for the trace file. Invariant: spans of one lane
do not overlap, except where the events say so; a span that had not ended ends with the last event.
"""

from bisect import bisect
from dataclasses import dataclass, field
from typing import Any

from fa_rollout.records.history import History
from fa_rollout.records.story import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of one lane."""

    lane: str
    kind: str
    """What gives it its colour: train, wait, start, update, write, load, bubble, work, evaluation."""
    name: str
    start_s: float
    end_s: float
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def spans(history: History) -> list[Span]:
    """All spans, lane by lane."""
    return [
        *_trainer(history),
        *_updates(history),
        *_engines(history),
        *_generator(history),
        *_evaluations(history),
    ]


def lanes(found: list[Span]) -> dict[str, list[Span]]:
    """By lane, each in the order of time."""
    by_lane: dict[str, list[Span]] = {}
    for span in found:
        by_lane.setdefault(span.lane, []).append(span)
    return {lane: sorted(members, key=lambda span: span.start_s) for lane, members in by_lane.items()}


def _trainer(history: History) -> list[Span]:
    found: list[Span] = []
    last_s: dict[str, float] = {}
    for step in sorted([*history.steps.values(), *history.lost], key=lambda step: step.composed_s):
        number = step.step
        for (rank, peer), part in sorted(step.ranks.items()):
            lane = f"rank {rank}" + (f".{peer}" if peer else "")
            is_first = lane not in last_s or history.has_left(last_s[lane], part.asked_s)
            last_s[lane] = part.handed_s
            kind, name = ("start", "start-up") if is_first else ("wait", f"wait for step {number}")
            found.append(Span(lane=lane, kind=kind, name=name, start_s=part.asked_s, end_s=part.handed_s))
            found.append(
                Span(
                    lane=lane,
                    kind="train",
                    name=f"step {number}",
                    start_s=part.handed_s,
                    end_s=part.finished_s or history.last_s,
                    facts={"version": step.version, "groups": len(step.groups)},
                )
            )
    return found + [
        _update(lane, [span.end_s for span in members], update, history)
        for lane, members in lanes(found).items()
        for update in history.updates
    ]


def _update(lane: str, ends_s: list[float], update: Update, history: History) -> Span:
    """A rank enters when it is done with its step, which may be later than the first one."""
    end_s = history.last_s if update.ended_s is None else update.ended_s
    after = bisect(ends_s, update.entering_s)
    start_s = max([update.entering_s, *(time_s for time_s in ends_s[after:] if time_s < end_s)])
    name = f"update to version {update.version}" if update.error is None else f"update failed: {update.error}"
    return Span(lane=lane, kind="update", name=name, start_s=start_s, end_s=end_s)


def _updates(history: History) -> list[Span]:
    found = []
    for update in history.updates:
        end_s = history.last_s if update.ended_s is None else update.ended_s
        name = f"version {update.version}"
        if update.open_s is not None:
            until_s = update.publishing_s or end_s
            found.append(
                Span(lane="weights", kind="write", name=f"write {name}", start_s=update.open_s, end_s=until_s)
            )
        if update.publishing_s is not None:
            found.append(
                Span(
                    lane="weights", kind="load", name=f"load {name}", start_s=update.publishing_s, end_s=end_s
                )
            )
    return found


def _engines(history: History) -> list[Span]:
    """Up from the generator's readiness on, but for the bubbles of updates."""
    found = []
    bubbles = [
        (u.ended_s - u.bubble_s, u.ended_s, u.version)
        for u in history.updates
        if u.ended_s is not None and u.bubble_s > 0
    ]
    for life in history.lives:
        if life.ready_s is None:
            continue
        at_s, end_s = life.ready_s, life.ended_s or history.last_s
        for start_s, stop_s, version in bubbles:
            if not at_s <= start_s <= end_s:
                continue
            found.append(Span(lane="engines", kind="work", name="up", start_s=at_s, end_s=start_s))
            name = f"paused for version {version}"
            found.append(Span(lane="engines", kind="bubble", name=name, start_s=start_s, end_s=stop_s))
            at_s = stop_s
        found.append(Span(lane="engines", kind="work", name="up", start_s=at_s, end_s=max(at_s, end_s)))
    return found


def _generator(history: History) -> list[Span]:
    found = []
    for life in history.lives:
        end_s = history.last_s if life.ended_s is None else life.ended_s
        ready_s = end_s if life.ready_s is None else life.ready_s
        name = f"life {life.incarnation}"
        found.append(
            Span(lane="generator", kind="start", name=f"{name} starts", start_s=life.started_s, end_s=ready_s)
        )
        if life.ready_s is not None:
            facts = {"ended": life.how} if life.how else {}
            found.append(
                Span(lane="generator", kind="work", name=name, start_s=ready_s, end_s=end_s, facts=facts)
            )
    return found


def _evaluations(history: History) -> list[Span]:
    """Those that go on at once get lanes of their own."""
    found: list[Span] = []
    ends: list[float] = []
    for evaluation in history.evaluations.values():
        end_s = history.last_s if evaluation.ended_s is None else evaluation.ended_s
        place = next((i for i, until_s in enumerate(ends) if until_s <= evaluation.began_s), len(ends))
        ends[place : place + 1] = [end_s]
        name = f"evaluation {evaluation.number}"
        found.append(
            Span(
                lane=f"evaluation {place + 1}" if place else "evaluation",
                kind="evaluation",
                name=f"{name} of {evaluation.dataset}" if evaluation.dataset else name,
                start_s=evaluation.began_s,
                end_s=end_s,
                facts={"prompts": evaluation.num_prompts},
            )
        )
    return found
