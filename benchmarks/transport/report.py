"""Results as a table on standard output, a chart and a JSON file."""

import dataclasses
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from benchmarks.transport.contender import ICEORYX2, NAMES, OURS, RING, RING_HUB, RING_SMALL
from benchmarks.transport.results import Figures, Key, Results
from benchmarks.transport.workload import SIZES, Form


def write(results: Results, path: Path) -> None:
    """Print the tables and write JSON and chart."""
    for line in _lines(results):
        print(line)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_tree(results), indent=1) + "\n")
    _chart(results, path.with_suffix(".png"))
    print(f"\n{path} and {path.with_suffix('.png')} written")


def _rows(results: Results, form: Form) -> Iterator[tuple[str, list[Figures | None]]]:
    for name in NAMES:
        figures = [results.figures(Key(contender=name, size=size.name, form=form)) for size in SIZES]
        if any(figures):
            yield name, figures


def _lines(results: Results) -> Iterator[str]:
    yield f"load average at the end {results.load_average:.1f} on {os.cpu_count()} CPUs"
    for form in Form:
        yield f"\n{form} (medians): groups/s, of memcpy, CPU us producer+consumer+helper, one-way p50/p99 us"
        yield f"{'':24}" + "".join(f"{size.name:>46}" for size in SIZES)
        for name, figures in _rows(results, form):
            yield f"{name:24}" + "".join(f"{_cell(f):>46}" for f in figures)
        floors = [results.touch_us.get((size.name, form)) for size in SIZES]
        texts = ["-" if us is None else f"{1e6 / us:,.0f} at most, {us:.0f} us" for us in floors]
        yield f"{'trainer alone':24}" + "".join(f"{text:>46}" for text in texts)
    yield "\ntimes as fast (median of the passes' ratios)"
    for title, ours, other in _comparisons():
        cells = [results.ratio(_key(ours, size.name), _key(other, size.name)) for size in SIZES]
        if any(cells):
            yield f"{title:60}" + "".join("         -" if c is None else f"{c:10.2f}" for c in cells)
    yield "\nidle, % of a CPU: producer, consumer, helper; growth, MB private/shared: producer, consumer"
    for name, shares in results.idle.items():
        memory = ", ".join(f"{m.private / 1e6:.0f}/{m.shared / 1e6:.0f}" for m in results.memory[name])
        yield f"{name:24}" + "".join(f"{100 * share:8.2f}" for share in shares) + f"   {memory}"
    for name, reason in results.left_out.items():
        yield f"left out: {name}: {reason}"


def _cell(figures: Figures | None) -> str:
    if figures is None:
        return "-"
    cpu = f"{figures.producer_us:.0f}+{figures.consumer_us:.0f}+{figures.helper_us:.0f}"
    delay = "-" if figures.p50_us is None else f"{figures.p50_us:.0f}/{figures.p99_us:.0f}"
    return f"{figures.groups_per_s:9,.0f} {figures.of_memcpy:6.3f} {cpu:>15} {delay:>12}"


Side = tuple[str, Form]


def _key(side: Side, size: str) -> Key:
    return Key(contender=side[0], size=size, form=side[1])


def _comparisons() -> Iterator[tuple[str, Side, Side]]:
    peers = [name for name in NAMES if name not in OURS]
    for peer in peers:
        yield f"like for like, per sample: {RING} / {peer}", (RING, Form.PER_SAMPLE), (peer, Form.PER_SAMPLE)
    for peer in peers:
        yield f"both packed: {RING} / {peer}", (RING, Form.PACKED), (peer, Form.PACKED)
    yield (
        f"as designed: {RING}, packed / {ICEORYX2}, per sample",
        (RING, Form.PACKED),
        (ICEORYX2, Form.PER_SAMPLE),
    )
    for form in Form:
        yield f"{RING_SMALL} / {ICEORYX2}, both {form}", (RING_SMALL, form), (ICEORYX2, form)
    yield f"{RING_HUB} / {RING}, packed", (RING_HUB, Form.PACKED), (RING, Form.PACKED)


def _tree(results: Results) -> dict[str, object]:
    return {
        "machine": {
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "load_average": results.load_average,
        "rows": [
            {**dataclasses.asdict(key), **dataclasses.asdict(figures), "num_passes": len(runs)}
            for key, runs in results.throughput.items()
            if (figures := results.figures(key))
        ],
        "times_as_fast": [
            {"what": title, "size": size.name, "ratio": ratio}
            for title, ours, other in _comparisons()
            for size in SIZES
            if (ratio := results.ratio(_key(ours, size.name), _key(other, size.name)))
        ],
        "touch_us": [
            {"size": size, "form": form, "cpu_us": cost} for (size, form), cost in results.touch_us.items()
        ],
        "idle_cpu": results.idle,
        "memory": {n: [dataclasses.asdict(m) for m in pair] for n, pair in results.memory.items()},
        "left_out": results.left_out,
    }


def _chart(results: Results, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), sharey=True)
    for axis, form in zip(axes, Form, strict=True):
        rows = list(_rows(results, form))
        width = 0.8 / max(1, len(rows))
        for index, (name, figures) in enumerate(rows):
            heights = [f.groups_per_s if f else 0 for f in figures]
            axis.bar([x + index * width for x in range(len(SIZES))], heights, width, label=name)
        axis.set_yscale("log")
        axis.set_xticks([x + 0.4 - width / 2 for x in range(len(SIZES))], [size.name for size in SIZES])
        axis.set_title(f"groups/s, {form}")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
