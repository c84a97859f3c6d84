"""What a check found."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from fa_rollout.preflight import Finding, Severity


class CheckStatus(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    """A run may work, but should be checked."""
    ERROR = "error"
    """A run cannot work."""
    SKIPPED = "skipped"
    """It was not run, because of another problem or because nothing needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOutcome:
    """One line of the doctor's table."""

    check: str
    status: CheckStatus
    text: str
    """What was found; for problems also the rule."""
    fix: str = ""
    """How to fix it; never empty for errors and warnings."""
    details: list[str] = field(default_factory=list)
    """More lines, such as prompts."""


def ok(check: str, text: str, details: Iterable[str] = ()) -> CheckOutcome:
    """A check that passed."""
    return CheckOutcome(check=check, status=CheckStatus.OK, text=text, details=list(details))


def warning(check: str, text: str, fix: str, details: Iterable[str] = ()) -> CheckOutcome:
    """A problem that a run may survive."""
    return CheckOutcome(check=check, status=CheckStatus.WARNING, text=text, fix=fix, details=list(details))


def error(check: str, text: str, fix: str, details: Iterable[str] = ()) -> CheckOutcome:
    """A problem that stops a run."""
    return CheckOutcome(check=check, status=CheckStatus.ERROR, text=text, fix=fix, details=list(details))


def skipped(check: str, text: str) -> CheckOutcome:
    """A check that was not run."""
    return CheckOutcome(check=check, status=CheckStatus.SKIPPED, text=text)


def judged(check: str, findings: list[Finding], text: str) -> list[CheckOutcome]:
    """What `preflight` found, or `text` if it found nothing."""
    if not findings:
        return [ok(check, text)]
    return [
        (error if finding.severity is Severity.ERROR else warning)(check, finding.text, finding.fix)
        for finding in findings
    ]
