"""What generation costs the trainer's own Python: the slow-down of a loop of Python and numpy work.

    python -m benchmarks.interference [--json OUT] [--quick]

A scripted engine keeps a number of requests running at a set rate, the same for all rows; the trainer works
in steps, and takes a batch of finished samples before each. Only the work is timed, not the wait:

    alone              no generation: what the others are compared with
    httpx, in process  the common shape: a thread with an asyncio loop, httpx and json, and a queue
    aiohttp, in process   the same with aiohttp
    httpx, elsewhere   the same in a process of its own, its samples thrown away: what the machine alone costs
    this system        hub, generator and ring, the batch by `hook.next_batch()`

Rows are measured in turn, several times over; figures are medians over the passes.
"""

import argparse
import asyncio
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.host import host
from benchmarks.interference.generation import beside_a_thread, beside_the_hub, keep_asking
from benchmarks.interference.load import SAMPLES_PER_GROUP, STEP_S, Load, loads
from benchmarks.interference.work import WORK_SHARE, calibrated, train
from fa_rollout.config import to_toml
from fa_rollout.engines.tiny_model import write_tiny_model
from tests.kit.scripted import Lengths, Script, ScriptedEngine

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz "
OURS, ALONE = "this system", "alone"
IN_PROCESS = {"httpx, in process": "httpx", "aiohttp, in process": "aiohttp"}
ELSEWHERE = "httpx, elsewhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a measuring process is told."""

    row: str
    url: str
    load: dict[str, Any]
    num_units: int
    num_steps: int
    output: str


def measure(job: Job) -> None:
    """Measure, and write down what was seen."""
    load = Load(**job.load)
    rate = 0.0
    if job.row == OURS:
        clocked, rate = beside_the_hub(load, job.num_units, job.num_steps)
    elif job.row in IN_PROCESS:
        clocked, rate = beside_a_thread(IN_PROCESS[job.row], job.url, load, job.num_units, job.num_steps)
    else:
        wait_s = STEP_S * (1 - WORK_SHARE)
        clocked = train(job.num_units, job.num_steps, lambda: time.sleep(wait_s) or 0.0)
    figures = {
        "unit_ms": 1e3 * statistics.fmean(clocked.wall_s),
        "unit_p99_ms": 1e3 * float(np.percentile(clocked.wall_s, 99)),
        "unit_cpu_ms": 1e3 * statistics.fmean(clocked.cpu_s),
        "handing_ms": 1e3 * statistics.fmean(clocked.handing_s),
        "samples_per_s": rate,
    }
    Path(job.output).write_text(json.dumps(figures))


def run_row(row: str, load: Load, num_units: int, num_steps: int) -> dict[str, float]:
    """One row of one pass."""
    script = Script(
        vocab_size=3 + len(CHARACTERS),
        lengths=Lengths(kind="uniform", low=int(load.tokens * 0.8), high=int(load.tokens * 1.2)),
        tokens_per_s=load.tokens_per_s,
        max_running=load.num_slots,
    )
    with tempfile.TemporaryDirectory() as name, ScriptedEngine.start(script) as engine:
        folder = Path(name)
        job = Job(
            row=row,
            url=engine.url,
            load=asdict(load),
            num_units=num_units,
            num_steps=num_steps,
            output=str(folder / "figures.json"),
        )
        command = [sys.executable, "-m", "benchmarks.interference", "--job", json.dumps(asdict(job))]
        if row == OURS:
            config = _write_config(folder, engine.url, load, num_steps)
            command = [sys.executable, "-m", "fa_rollout.cli", "run", str(config), "--", *command]
        other = None
        if row == ELSEWHERE:
            words = [sys.executable, "-m", "benchmarks.interference", "--generate", json.dumps(asdict(job))]
            other = subprocess.Popen(words, stdin=subprocess.PIPE)
        try:
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        finally:
            if other is not None:
                other.kill()
                other.communicate()
        if done.returncode:
            raise RuntimeError(f"{row} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
        found: dict[str, float] = json.loads((folder / "figures.json").read_text())
        return found


def _write_config(folder: Path, url: str, load: Load, num_steps: int) -> Path:
    write_tiny_model(folder / "model", characters=CHARACTERS)
    row = json.dumps({"prompt": CHARACTERS * 3})
    (folder / "prompts.jsonl").write_text("\n".join([row] * 512))
    ahead = -(-2 * load.num_slots // (load.groups_per_step * SAMPLES_PER_GROUP)) + 1
    tree = {
        "data": {"path": str(folder / "prompts.jsonl")},
        "rollout": {
            "num_steps": num_steps + ahead,  # so that generation goes on to the last step that counts
            "groups_per_step": load.groups_per_step,
            "samples_per_group": SAMPLES_PER_GROUP,
            "update_interval": num_steps + ahead,
            "staleness": 1,
        },
        "sampling": {"max_new_tokens": 1 << 15},
        "reward": {"function": "benchmarks.endtoend:reward", "in_loop": True},
        "engine": {
            "urls": [url],
            "tokenizer": str(folder / "model"),
            "max_concurrent_samples": load.num_slots,
        },
        "ring": {"bytes": 512 << 20},
    }
    path = folder / "run.toml"
    path.write_text(to_toml(tree))
    return path


def rows(*, quick: bool) -> list[str]:
    """Those whose packages are there."""
    has_httpx = importlib.util.find_spec("httpx") is not None
    in_process = [row for row, client in IN_PROCESS.items() if client != "httpx" or has_httpx]
    return [
        ALONE,
        *in_process[: 1 if quick else None],
        *([ELSEWHERE] if has_httpx and not quick else []),
        OURS,
    ]


def compare(load: Load, *, quick: bool) -> list[dict[str, Any]]:
    """All rows under one load, in turn, several times over."""
    names, num_units = rows(quick=quick), calibrated()
    passes: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(2 if quick else 3):
        for name in names:
            passes[name].append(run_row(name, load, num_units, 8 if quick else 14))
    alone_ms = statistics.median(one["unit_ms"] for one in passes[ALONE])
    found = []
    for name, several in passes.items():
        figures = {key: statistics.median(one[key] for one in several) for key in several[0]}
        figures["slowdown"] = figures["unit_ms"] / alone_ms - 1.0
        found.append({"load": str(load), "row": name} | figures)
        print(_line(found[-1]), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """All loads, printed as they come and written as one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--quick", action="store_true", help="one load, shorter")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--generate", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job:
        measure(Job(**options.job))
        return
    if options.generate:
        job = Job(**options.generate)
        asyncio.run(keep_asking("httpx", job.url, Load(**job.load), lambda sample: None, threading.Event()))
        return
    found = [row for load in loads(quick=options.quick) for row in compare(load, quick=options.quick)]
    if options.json:
        report = {"benchmark": "interference", "quick": options.quick, "host": host(), "rows": found}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['load']:42} {row['row']:20} work {row['slowdown']:+7.1%}  unit {row['unit_ms']:.2f} ms "
        f"(p99 {row['unit_p99_ms']:.2f}, cpu {row['unit_cpu_ms']:.2f})  "
        f"handing over {row['handing_ms']:.2f} ms  {row['samples_per_s']:.0f} samples/s"
    )


if __name__ == "__main__":
    main()
