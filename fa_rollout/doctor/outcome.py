"""What a check found."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from fa_rollout.preflight import Finding, Severity


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    """A run may work; somebody should look."""
    ERROR = "error"
    """A run would not work."""
    SKIPPED = "skipped"
    """It could not be tried, because of another finding or because nothing asks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One line of the doctor's table."""

    check: str
    status: Status
    text: str
    """What was found; for failures also what must hold."""
    fix: str = ""
    """How to mend it; never empty for errors and warnings."""
    details: list[str] = field(default_factory=list)
    """Further lines, such as prompts."""


def ok(check: str, text: str, details: Iterable[str] = ()) -> Outcome:
    """All is well."""
    return Outcome(check=check, status=Status.OK, text=text, details=list(details))


def warning(check: str, text: str, fix: str, details: Iterable[str] = ()) -> Outcome:
    """Somebody should look."""
    return Outcome(check=check, status=Status.WARNING, text=text, fix=fix, details=list(details))


def error(check: str, text: str, fix: str, details: Iterable[str] = ()) -> Outcome:
    """A run would not work."""
    return Outcome(check=check, status=Status.ERROR, text=text, fix=fix, details=list(details))


def skipped(check: str, text: str) -> Outcome:
    """It was not tried."""
    return Outcome(check=check, status=Status.SKIPPED, text=text)


def judged(check: str, findings: list[Finding], text: str) -> list[Outcome]:
    """What `preflight` found; `text` where it found nothing."""
    if not findings:
        return [ok(check, text)]
    return [
        (error if finding.severity is Severity.ERROR else warning)(check, finding.text, finding.fix)
        for finding in findings
    ]
