"""Outcomes for a terminal, and for programs."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fa_rollout.doctor.outcome import CheckOutcome, CheckStatus
from trainer_hook.printable import printable, printable_json

_MARKS = {
    CheckStatus.OK: "ok",
    CheckStatus.WARNING: "warning",
    CheckStatus.ERROR: "error",
    CheckStatus.SKIPPED: "-",
}
_STYLES = {
    CheckStatus.OK: "green",
    CheckStatus.WARNING: "yellow",
    CheckStatus.ERROR: "bold red",
    CheckStatus.SKIPPED: "dim",
}


def show(outcomes: Sequence[CheckOutcome], console: Console) -> None:
    """One line per check, the fix below each problem, and a summary."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for outcome in outcomes:
        cell = Text(
            printable(outcome.text, lines=True), style="dim" if outcome.status is CheckStatus.SKIPPED else ""
        )
        for line in outcome.details:
            cell.append(f"\n{printable(line, lines=True)}", style="dim")
        if outcome.fix:
            cell.append(f"\nfix: {printable(outcome.fix)}", style=_STYLES[outcome.status])
        mark = Text(_MARKS[outcome.status], style=_STYLES[outcome.status])
        table.add_row(mark, outcome.check, cell)
    console.print(table)
    console.print(Padding(_summary(outcomes), (1, 0, 0, 0)))


def _summary(outcomes: Sequence[CheckOutcome]) -> Text:
    counts = Counter(outcome.status for outcome in outcomes)
    found = (
        f"{_counted(counts[CheckStatus.ERROR], 'error')}, {_counted(counts[CheckStatus.WARNING], 'warning')}"
    )
    if counts[CheckStatus.ERROR]:
        return Text(f"{found}: fix the errors before you start a run", "bold red")
    if counts[CheckStatus.WARNING]:
        return Text(f"{found}: a run can start", "yellow")
    return Text("all checks passed", "green")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def as_json(outcomes: Sequence[CheckOutcome]) -> str:
    """A list of objects."""
    text = json.dumps([asdict(outcome) for outcome in outcomes], indent=1, ensure_ascii=False)
    return printable_json(text)
