"""What was played, and what it showed, for a terminal."""

from collections.abc import Sequence
from dataclasses import fields

from rich.console import Console
from rich.table import Table

from fa_rollout.simulation.scenario import VAST_RING_BYTES, Scenario
from fa_rollout.simulation.sweep import Sweep, SweepRow

_COLUMNS = {
    "step_s": ("step", "{:.3g} s"),
    "trainer_idle": ("idle", "{:.1%}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "utilisation": ("slots", "{:.0%}"),
    "staleness_p50": ("stale p50", "{:.3g}"),
    "staleness_p99": ("stale p99", "{:.3g}"),
    "dropped": ("dropped", "{:.0%}"),
    "length_bias": ("length", "{:+.1%}"),
}
"""Figure -> heading and form."""
_LEGEND = (
    "idle: the trainer waits for data; slots: busy share of the engines' slots; stale: versions between "
    "sampling and training; dropped: share of groups; length: of trained answers against drawn ones"
)
_WIDEST = 400
_LEFT_OUT = ("lengths", "ring_bytes", "seed")


def show(
    scenario: Scenario, sweeps: Sequence[Sweep], rows: Sequence[SweepRow], console: Console | None = None
) -> None:
    """Print assumptions and figures."""
    console = console or Console()
    swept = {sweep.field for sweep in sweeps}
    names = [field.name for field in fields(Scenario) if field.name not in (*_LEFT_OUT, *swept)]
    settings = [f"{name}={_short(getattr(scenario, name))}" for name in names]
    if scenario.ring_bytes != VAST_RING_BYTES:
        settings.append(f"ring_bytes={scenario.ring_bytes}")
    console.print(" ".join(settings), style="dim", highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for sweep in sweeps:
        table.add_column(sweep.name, justify="right", style="bold", no_wrap=True)
    for heading, _ in _COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            *(_short(row.setting[sweep.name]) for sweep in sweeps),
            *(form.format(row.figures[key]) for key, (_, form) in _COLUMNS.items()),
        )
    whole = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    width = console.width
    console.width = max(width, whole)  # a row that wraps is read, one that is cut is not
    console.print(table)
    console.width = width
    console.print(_LEGEND, style="dim", highlight=False)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
