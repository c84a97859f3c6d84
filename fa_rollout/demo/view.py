"""The demo's live view: a progress line and a table where there is a terminal, else a line now and then.

In: the figures file of a running trainer, and lines for a person. Out: the screen. Invariant: it only reads;
a view that is not there changes nothing of the run.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fa_rollout.demo.curve import sparkline
from fa_rollout.demo.figures import DemoStep, FiguresReader
from trainer_hook.printable import printable

COLUMNS = {"step": 5, "reward": 7, "tokens/s": 9, "trainer idle": 13, "staleness": 10, "ring fill": 10}
"""Names and widths; with the elapsed time they fit 80 characters."""
_ELAPSED_WIDTH = 9
_NUM_PLAIN_LINES = 20
_TOLD_EVERY_S = 30.0


class DemoView:
    """Shows steps as they come."""

    def __init__(self, path: Path, num_steps: int, console: Console) -> None:
        self.steps: list[DemoStep] = []
        self._reader = FiguresReader(path)
        self._num_steps = num_steps
        self._console = console
        self._started_s = time.monotonic()
        self._is_live = console.is_terminal
        self._live = Live(console=console, auto_refresh=False, transient=True) if self._is_live else None
        self._header_shown = False

    def tick(self) -> None:
        """Read what is new, and show it."""
        fresh = self._reader.read()
        self.steps += fresh
        if self._live is not None:
            self._live.update(self._screen(), refresh=True)
            return
        every = max(1, self._num_steps // _NUM_PLAIN_LINES)
        for figures in fresh:
            if (figures.step + 1) % every == 0 or figures.step in (0, self._num_steps - 1):
                self._line(figures)

    def say(self, text: str) -> None:
        """Print a line above the live view."""
        self._console.print(Text(printable(text, lines=True)))

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _line(self, figures: DemoStep) -> None:
        if not self._header_shown:
            self._header_shown = True
            self.say(_row(COLUMNS, "elapsed"))
        self.say(_row(cells(figures), f"{self.elapsed_s:.0f} s"))

    def _screen(self) -> Group:
        if not self.steps:
            return Group(
                Text(f"starting engine, generator and trainer ... {self.elapsed_s:.0f} s", style="dim")
            )
        last = self.steps[-1]
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name, width in COLUMNS.items():
            table.add_column(name, justify="right", min_width=width)
        table.add_row(*cells(last))
        curve = Text.assemble(
            ("reward  ", "dim"), (sparkline([figures.reward for figures in self.steps]), "cyan")
        )
        example = Text.assemble(
            ("sample  ", "dim"), printable(last.example)[: max(20, self._console.width - 10)]
        )
        bar = ProgressBar(total=self._num_steps, completed=last.step + 1, width=40)
        progress = Table.grid(padding=(0, 2))
        progress.add_row(bar, Text(f"step {last.step + 1} of {self._num_steps}, {self.elapsed_s:.0f} s"))
        return Group(progress, table, curve, example)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tick()
        if self._live is not None:
            self._live.stop()


def _row(words: Iterable[str], elapsed: str) -> str:
    widths = (*COLUMNS.values(), _ELAPSED_WIDTH)
    return " ".join(f"{word:>{width}}" for word, width in zip((*words, elapsed), widths, strict=True))


def cells(figures: DemoStep) -> tuple[str, ...]:
    """One row, in the order of the columns."""
    return (
        str(figures.step + 1),
        f"{figures.reward:.3f}",
        f"{figures.tokens_per_s:,.0f}",
        f"{figures.idle:.0%}",
        "-" if figures.staleness is None else str(figures.staleness),
        f"{figures.ring_fill:.0%}",
    )
