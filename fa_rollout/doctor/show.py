"""Outcomes for a terminal, and for programs."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fa_rollout.doctor.outcome import Outcome, Status
from trainer_hook.printable import printable, printable_json

_MARKS = {Status.OK: "ok", Status.WARNING: "look", Status.ERROR: "mend", Status.SKIPPED: "-"}
_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.ERROR: "bold red", Status.SKIPPED: "dim"}


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """A line a check, what to do beneath those that failed, and a last word."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for outcome in outcomes:
        cell = Text(
            printable(outcome.text, lines=True), style="dim" if outcome.status is Status.SKIPPED else ""
        )
        for line in outcome.details:
            cell.append(f"\n{printable(line, lines=True)}", style="dim")
        if outcome.fix:
            cell.append(f"\nfix: {printable(outcome.fix)}", style=_STYLES[outcome.status])
        mark = Text(_MARKS[outcome.status], style=_STYLES[outcome.status])
        table.add_row(mark, outcome.check, cell)
    console.print(table)
    console.print(Padding(_summary(outcomes), (1, 0, 0, 0)))


def _summary(outcomes: Sequence[Outcome]) -> Text:
    counts = Counter(outcome.status for outcome in outcomes)
    if counts[Status.ERROR]:
        return Text(
            f"{counts[Status.ERROR]} to mend before a run, {counts[Status.WARNING]} to look at", "bold red"
        )
    if counts[Status.WARNING]:
        return Text(f"a run may start; {counts[Status.WARNING]} to look at", "yellow")
    return Text("all is well", "green")


def as_json(outcomes: Sequence[Outcome]) -> str:
    """A list of objects."""
    text = json.dumps([asdict(outcome) for outcome in outcomes], indent=1, ensure_ascii=False)
    return printable_json(text)
