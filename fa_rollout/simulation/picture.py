"""A sweep as a picture: one panel a figure, the first knob along it, a line for each value of the others."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fa_rollout.config import ConfigError
from fa_rollout.simulation.sweep import Sweep, SweepRow

_PANELS = {
    "step_s": "seconds a step",
    "trainer_idle": "trainer idle",
    "staleness_p99": "staleness, p99",
    "tokens_per_s": "trained tokens a second",
}


def draw(rows: Sequence[SweepRow], sweeps: Sequence[Sweep], path: Path) -> None:
    """Write SVG, PNG or whatever the name of `path` says.

    Raises:
        ConfigError: matplotlib is missing, or has no such format.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        mpl.rcParams["svg.fonttype"] = "none"  # text stays text: a third of the size
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError(
            f"a picture needs matplotlib ({error}): pip install 'fa-rollout[simulation]'"
        ) from None
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), sharex=True)
    for axis, (key, title) in zip(axes.flat, _PANELS.items(), strict=True):
        for name, line in _lines(rows, sweeps).items():
            axis.plot(
                [str(x) for x, _ in line], [row.figures[key] for _, row in line], "o-", label=name, ms=4
            )
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel(sweeps[0].name)
    if len(sweeps) > 1:
        axes.flat[0].legend(fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise ConfigError(f"a picture must be named .svg, .png or .pdf, found {path}: {error}") from None
    finally:
        pyplot.close(figure)


def _lines(rows: Sequence[SweepRow], sweeps: Sequence[Sweep]) -> dict[str, list[tuple[Any, SweepRow]]]:
    lines: dict[str, list[tuple[Any, SweepRow]]] = {}
    for row in rows:
        name = ", ".join(f"{sweep.name} {row.setting[sweep.name]}" for sweep in sweeps[1:])
        lines.setdefault(name, []).append((row.setting[sweeps[0].name], row))
    return lines
