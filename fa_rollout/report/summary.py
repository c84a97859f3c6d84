"""All that the page tells, gathered once. In: a history. Out: figures, shares, series, a verdict. Pure."""

from dataclasses import dataclass
from statistics import fmean

from fa_rollout.account.bound import Holds, Stretch
from fa_rollout.account.figures import StepFigures, TimeSpent
from fa_rollout.account.verdict import RunFacts, Verdict, judge_run
from fa_rollout.launcher.ending import INTERRUPTED_CODES
from fa_rollout.records.history import History
from fa_rollout.records.story import ENDS
from fa_rollout.report import figures
from fa_rollout.report.figures import Series


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One launch, in numbers."""

    history: History
    steps: list[StepFigures]
    spent: TimeSpent
    """The trainer's, since its first batch."""
    over: Series
    staleness: int
    """The bound."""
    verdict: Verdict

    @property
    def duration_s(self) -> float:
        return self.history.last_s - self.history.began_s

    @property
    def num_tokens(self) -> int:
        """Response tokens of trained steps."""
        return sum(step.response_tokens for step in self.steps)


def summarize(history: History, holds: Holds | None = None) -> Summary:
    """Compute everything; `holds`: what the metrics saw."""
    steps = figures.steps_of(history)
    over = figures.series(history)
    stretch = _stretch(history, steps, holds or Holds())
    reasons = figures.reasons(history)
    failed = [kind for how, kind, _, _ in reasons if how == "failed"]
    spent_s = stretch.spent.total_s
    books = history.books
    facts = RunFacts(
        stretch=stretch,
        staleness_max=max((s.staleness_max for s in steps if s.staleness_max is not None), default=None),
        bubble_share=sum(u.bubble_s for u in history.updates) / spent_s if spent_s > 0 else 0.0,
        num_ended=sum(books.get(name, 0) for name in ENDS),
        num_filtered=books.get("filtered", 0),
        num_failed=books.get("failed", 0),
        worst_reason=failed[0] if failed else "",
        num_generator_deaths=sum(bool(life.how) for life in history.lives),
        mistake=_mistake(history),
    )
    return Summary(
        history=history,
        steps=steps,
        spent=stretch.spent,
        over=over,
        staleness=stretch.staleness,
        verdict=judge_run(facts),
    )


def _stretch(history: History, steps: list[StepFigures], holds: Holds) -> Stretch:
    books = history.books
    settled = books.get("trained", 0) + books.get("filtered", 0)
    return Stretch(
        spent=figures.spent(history, steps),
        staleness=int((history.config.get("rollout") or {}).get("staleness", 0)),
        busy=_busy(steps) if holds.busy is None else holds.busy,
        filtered=books.get("filtered", 0) / settled if settled else 0.0,
        num_engines=max((len(life.engines) for life in history.lives), default=0),
        holds=holds,
    )


def _busy(steps: list[StepFigures]) -> float | None:
    known = [step.busy for step in steps if step.busy is not None]
    return fmean(known) if known else None


def _mistake(history: History) -> str:
    if history.fatal is not None:
        return history.fatal.splitlines()[0]
    if history.exit_code and history.exit_code not in INTERRUPTED_CODES:
        return history.ending
    return ""
