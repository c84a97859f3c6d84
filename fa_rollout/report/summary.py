"""All that the page tells, gathered once. In: a history. Out: figures, shares, series, a verdict. Pure."""

from dataclasses import dataclass

from fa_rollout.launcher.ending import INTERRUPTED_CODES
from fa_rollout.records.history import History
from fa_rollout.report import figures
from fa_rollout.report.figures import Series, StepFigures
from fa_rollout.report.verdict import Facts, Verdict, judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One launch, in numbers."""

    history: History
    steps: list[StepFigures]
    shares: dict[str, float]
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
        return sum(step.num_tokens for step in self.steps)

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step that has one."""
        return [step.reward for step in self.steps if step.reward is not None]


def summarize(history: History) -> Summary:
    """Compute everything."""
    steps = figures.step_figures(history)
    shares = figures.shares(steps)
    over = figures.series(history)
    bound = int((history.config.get("rollout") or {}).get("staleness", 0))
    books = history.books
    reasons = figures.reasons(history)
    failed = [kind for how, kind, _, _ in reasons if how == "failed"]
    trained_s = sum(step.total for step in steps)
    bubbles_s = sum(update.bubble_s for update in history.updates)
    facts = Facts(
        shares=shares,
        load=figures.load(history, steps, over, in_waits=False),
        load_in_waits=figures.load(history, steps, over, in_waits=True),
        away_share=figures.away_share(history, steps),
        staleness=bound,
        staleness_max=max((s.staleness_max for s in steps if s.staleness_max is not None), default=None),
        bubble_share=bubbles_s / trained_s if trained_s > 0 else 0.0,
        num_ended=sum(books.get(name, 0) for name in ("trained", "filtered", "failed", "dropped")),
        num_filtered=books.get("filtered", 0),
        num_failed=books.get("failed", 0),
        worst_reason=failed[0] if failed else "",
        num_generator_deaths=sum(bool(life.how) for life in history.lives),
        mistake=_mistake(history),
    )
    return Summary(
        history=history, steps=steps, shares=shares, over=over, staleness=bound, verdict=judge(facts)
    )


def _mistake(history: History) -> str:
    if history.fatal is not None:
        return history.fatal.splitlines()[0]
    if history.exit_code and history.exit_code not in INTERRUPTED_CODES:
        return history.ending
    return ""
