"""Every claim on one page: runs the benchmarks one after the other, and prints machine, ratios and commands.

    scripts/bench [--quick] [--output DIR] [--only NAME ...]

DIR gets `page.md`, and of each benchmark its JSON and what it printed. One that fails is named, and the
others go on.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.host import host
from fa_rollout.version import __version__

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One benchmark, and what of it goes on the page."""

    name: str
    title: str
    summary: Callable[[Tree], Iterator[str]]

    def command(self, folder: Path, *, quick: bool) -> list[str]:
        """What runs it."""
        words = ["-m", f"benchmarks.{self.name}", "--json", str(folder / f"{self.name}.json")]
        return [sys.executable, *words, *(["--quick"] if quick else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one went."""

    part: Part
    command: str
    took_s: float
    tree: Tree | None
    failure: str = ""


# --- what of each goes on the page -----------------------------------------------------------------------


def transport(tree: Tree) -> Iterator[str]:
    """How many times as fast as each peer."""
    sizes = list(dict.fromkeys(row["size"] for row in tree["times_as_fast"]))
    yield from _head(["groups a second, times as fast", *sizes])
    for what in dict.fromkeys(row["what"] for row in tree["times_as_fast"]):
        ratios = {row["size"]: row["ratio"] for row in tree["times_as_fast"] if row["what"] == what}
        yield _row([what, *(f"{ratios[size]:.2f}" if size in ratios else "" for size in sizes)])
    yield from _left_out(tree)


def client(tree: Tree) -> Iterator[str]:
    """CPU a sample, and how many times that of this client the others need."""
    rows = [row for row in tree["rows"] if row["kind"] == "load"]
    names = list(dict.fromkeys(row["client"] for row in rows))
    ratios = [f"{name} / pool" for name in names if name != "pool"]
    yield from _head(["answers, at once", *(f"{name}: CPU ms a sample" for name in names), *ratios])
    for key in dict.fromkeys((row["tokens"], row["in_flight"]) for row in rows):
        cost = {
            row["client"]: row["results"]["cpu_ms_per_sample"]
            for row in rows
            if (row["tokens"], row["in_flight"]) == key
        }
        shown = [f"{cost[name]:.2f}" if name in cost else "" for name in names]
        others = [name for name in names if name != "pool"]
        times = [f"{cost[name] / cost['pool']:.1f}" if name in cost else "" for name in others]
        yield _row([f"{key[0]:,} tokens, {key[1]:,}", *shown, *times])
    yield from _left_out(tree)


def interference(tree: Tree) -> Iterator[str]:
    """How much slower the trainer's own work is."""
    yield from _head(["generation", "where", "trainer's work", "handing a batch over", "samples/s"])
    for row in tree["rows"]:
        rate = f"{row['samples_per_s']:.0f}" if row["samples_per_s"] else ""
        handing = f"{row['handing_ms']:.2f} ms" if rate else ""
        yield _row([row["load"], row["row"], f"{row['slowdown']:+.1%}", handing, rate])


def endtoend(tree: Tree) -> Iterator[str]:
    """Step time against a perfect overlap."""
    yield from _head(["overlap", "step", "of a perfect one", "trainer idle", "staleness p50/p99"])
    for row in tree["rows"]:
        found = row["results"]
        ages = "/".join(str(age) for age in found["staleness"].values())
        figures = [f"{found['step_s']:.2f} s", f"{found['efficiency']:.0%}", f"{found['trainer_idle']:.0%}"]
        yield _row([row["name"], *figures, ages])


def validate_simulation(tree: Tree) -> Iterator[str]:
    """Measured and simulated."""
    yield from _head(["setting", "step, measured", "simulated", "idle, measured", "simulated"])
    for row in tree["rows"]:
        measured, simulated = row["measured"], row["simulated"]
        steps = [f"{measured['step_s']:.2f} s", f"{simulated['step_s']:.2f} s"]
        idle = [f"{measured['trainer_idle']:.0%}", f"{simulated['trainer_idle']:.0%}"]
        yield _row([row["name"], *steps, *idle])
    missed = tree["errors"]
    steps = f"{missed['step_s_mean']:.1%} in the mean and {missed['step_s_worst']:.1%} at worst"
    idle = f"{100 * missed['trainer_idle_mean']:.1f} points and {100 * missed['trainer_idle_worst']:.1f}"
    yield f"\nStep time is off by {steps}, trainer idle by {idle}."


PARTS = (
    Part(name="transport", title="Transport: the ring against its peers", summary=transport),
    Part(name="client", title="Client: what a sample costs", summary=client),
    Part(name="interference", title="Interference: the cost to the trainer's Python", summary=interference),
    Part(name="endtoend", title="Whole runs: ways of overlapping", summary=endtoend),
    Part(
        name="validate_simulation", title="Simulator: predictions against runs", summary=validate_simulation
    ),
)


# --- the page --------------------------------------------------------------------------------------------


def page(results: Sequence[Result], machine: Tree, *, quick: bool) -> str:
    """Markdown."""
    lines = [f"# fa_rollout {__version__}, measured{' (quick)' if quick else ''}", ""]
    lines += [", ".join(f"{name} {value}" for name, value in machine.items()), ""]
    if machine["load_average"] > machine["cpus"] / 4:
        lines += ["Other programs kept this machine busy at the start: times and ratios below are noise.", ""]
    for result in results:
        lines += [f"## {result.part.title}", ""]
        lines += [f"    {result.command}", "", f"{result.took_s:.0f} s", ""]
        if result.tree is None:
            lines += [f"It failed:\n\n```\n{result.failure}\n```"]
        else:
            lines += list(result.part.summary(result.tree))
        lines.append("")
    return "\n".join(lines)


def run(part: Part, folder: Path, *, quick: bool) -> Result:
    """One benchmark; what it prints goes to the screen and into a file."""
    command = part.command(folder, quick=quick)
    began_s = time.monotonic()
    printed: list[str] = []
    with (
        (folder / f"{part.name}.txt").open("w", encoding="utf-8") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
            printed.append(line)
    code = process.wait()
    path = folder / f"{part.name}.json"
    is_whole = code == 0 and path.is_file()
    return Result(
        part=part,
        command=" ".join(["python", *command[1:]]),
        took_s=time.monotonic() - began_s,
        tree=json.loads(path.read_text(encoding="utf-8")) if is_whole else None,
        failure="" if is_whole else f"exit code {code}\n{''.join(printed[-15:])}",
    )


def _left_out(tree: Tree) -> Iterator[str]:
    for name, reason in tree["left_out"].items():
        yield f"\nleft out: {name}: {reason}"


def _head(cells: Sequence[str]) -> Iterator[str]:
    yield _row(cells)
    yield "|" + "---|" * len(cells)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """All of them; 1 when one failed."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rows, a few minutes")
    parser.add_argument("--output", type=Path, help="folder for pages and figures (default: out/bench-TIME)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    options = parser.parse_args(arguments)
    folder = options.output or Path("out") / time.strftime("bench-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    machine = host()
    chosen = [part for part in PARTS if options.only is None or part.name in options.only]
    results = []
    for part in chosen:
        print(f"\n== {part.title}", flush=True)
        results.append(run(part, folder, quick=options.quick))
    text = page(results, machine, quick=options.quick)
    (folder / "page.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\n{folder / 'page.md'} written")
    return 1 if any(result.tree is None for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
