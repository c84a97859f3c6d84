"""The reward curve: as a picture, and as a line of text.

In: rewards by step. Out: a PNG file, a line of block characters. Invariant: neither changes the figures; the
smoothed line is a plain mean of the last steps.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

_BLOCKS = "▁▂▃▄▅▆▇█"
_SMOOTHED_OVER = 10


def sparkline(values: Sequence[float], *, width: int = 60, low: float = 0.0, high: float = 1.0) -> str:
    """At most `width` block characters, each the mean of its share of `values`."""
    width = min(width, len(values))
    bounds = [index * len(values) // width for index in range(width + 1)] if width else [0]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(min(1.0, max(0.0, (mean - low) / (high - low))) * top)] for mean in means)


def smooth(values: Sequence[float], over: int = _SMOOTHED_OVER) -> list[float]:
    """Mean of each value and up to `over - 1` before it."""
    return [sum(values[max(0, i + 1 - over) : i + 1]) / min(over, i + 1) for i in range(len(values))]


def draw(rewards: Sequence[float], staleness: Sequence[int | None], path: Path, *, title: str) -> None:
    """Reward by step above, staleness below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 5), sharex=True, height_ratios=(4, 1), constrained_layout=True
    )
    steps = range(1, len(rewards) + 1)
    above.plot(steps, rewards, color="#9ecae1", linewidth=1, label="mean reward of a step")
    above.plot(steps, smooth(rewards), color="#08519c", linewidth=2, label=f"mean of {_SMOOTHED_OVER} steps")
    above.set(ylabel="reward", ylim=(0, 1.02), title=title)
    above.legend(loc="lower right", frameon=False)
    known = [float("nan") if value is None else value for value in staleness]
    below.step(steps, known, color="#a63603", where="mid")
    below.set(xlabel="step", ylabel="staleness", ylim=(0, max(value or 1 for value in [1, *staleness]) + 0.5))
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
