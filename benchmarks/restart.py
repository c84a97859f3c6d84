"""The generator is killed under a live trainer: how soon new groups start, and whether the trainer notices.

    python -m benchmarks.restart [--json OUT] [--quick]

Each row is a run of its own: a scripted engine, a trainer that works a set time a step, and one SIGKILL of
the generator in the middle. Times are from the kill, on the clock of the event log:

    noticed     the hub has reaped it, and has given its groups back
    ready       the next life has its data, its tokenizer and the engines
    dispatched  the first group of the next life has left for an engine
    trainer     the longest wait for a batch, from the kill on, beside the longest before it
    backlog     steps of groups that were finished at the kill: how many, how many of them were handed over
                while no generator was ready, and the share of their time that the trainer waited for data
    update      the longest weight update from the kill on, which needs a generator to reach the engines

Rows: plain user code; a reward that imports torch; a custom generate function that imports torch; the same
reward with an update every fourth step, so that the trainer needs nothing but the backlog. Each with and
without a spare, a process that stands ready to take over (`run.spare_generator`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.host import host
from benchmarks.launching import failure, words
from fa_rollout.account import event_file, events
from fa_rollout.config import to_toml
from fa_rollout.engines.tiny_model import write_tiny_model
from tests.kit.scripted import Lengths, Script, ScriptedEngine
from trainer_hook import EndOfData, TrainerHook

GROUPS_PER_STEP, SAMPLES_PER_GROUP = 8, 4
STALENESS = 4
TRAIN_S = 0.6
KILL_AT_STEP = 4
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz "
_DEADLINE_S = 90.0

USER_CODE = """
{imports}

def reward(sample):
    return float(len(sample.response_ids))

async def generate(context, sample, sampling_params):
    turn = await context.generate(sample.prompt_ids, sampling_params)
    context.append_turn(sample, turn)
    return sample
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of run."""

    name: str
    imports: str = ""
    generate: bool = False
    update_interval: int = 1
    spare: bool = True


def rows(*, quick: bool) -> list[Row]:
    """All kinds."""
    kinds = [
        {"name": "plain"},
        {"name": "torch in the reward", "imports": "import torch"},
        {"name": "torch in generate", "imports": "import torch", "generate": True},
        {"name": "update every 4", "imports": "import torch", "update_interval": 4},
    ]
    return [Row(**kind, spare=spare) for kind in kinds[: 1 if quick else None] for spare in (True, False)]


# --- the trainer, in a process of its own ---------------------------------------------------------------


def train(output: Path) -> None:
    """Train every step; a line each for the batch that came, and for the update behind it."""

    def note(**values: float) -> None:
        notes.write(json.dumps(values) + "\n")
        notes.flush()

    with TrainerHook.attach() as hook, output.open("a") as notes:
        while True:
            asked_s = time.monotonic()
            try:
                with hook.next_batch() as batch:
                    note(step=batch.step, asked_s=asked_s, got_s=time.monotonic())
                    time.sleep(TRAIN_S)
                if hook.step % hook.run.update_interval == 0:
                    entered_s = time.monotonic()
                    with hook.update_weights():
                        pass
                    note(entered_s=entered_s, left_s=time.monotonic())
            except EndOfData:
                return


# --- the measurement ------------------------------------------------------------------------------------


def measure(row: Row) -> dict[str, float]:
    """One run with one kill."""
    script = Script(
        vocab_size=3 + len(CHARACTERS),
        lengths=Lengths(kind="lognormal", tokens=60, sigma=0.6, low=1, high=400, seed=1),
        tokens_per_s=600.0,
    )
    with tempfile.TemporaryDirectory() as name, ScriptedEngine.start(script) as engine:
        folder = Path(name)
        config = _write_config(folder, row, engine.url)
        notes, log = folder / "steps.jsonl", folder / "run.log"
        command = [sys.executable, "-m", "fa_rollout.cli", "run", str(config)]
        command += ["--", sys.executable, "-m", "benchmarks.restart", "--trainer", str(notes)]
        path = os.pathsep.join([str(folder), os.getcwd(), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path}
        with log.open("wb") as file:
            launcher = subprocess.Popen(command, stderr=file, env=environment)
        try:
            _await(lambda: len(_steps(notes)) > KILL_AT_STEP)
            killed_s = time.monotonic()
            _generator(launcher.pid).kill()
            if launcher.wait(_DEADLINE_S) != 0:
                raise RuntimeError(failure(launcher.returncode, log))
        finally:
            if launcher.poll() is None:
                launcher.terminate()
                launcher.wait(_DEADLINE_S)
        return _figures(row, list(event_file.read(folder / event_file.FILE_NAME)), _lines(notes), killed_s)


def _figures(
    row: Row, log: list[events.Event], notes: list[dict[str, Any]], killed_s: float
) -> dict[str, float]:
    end = log[-1]
    assert isinstance(end, events.HubEnded)
    counts = end.counts
    assert counts["failed"] == counts["dropped"] == 0, counts

    def first(kind: type[events.Event], since_s: float = 0.0) -> float:
        times = (event.t - killed_s for event in log if isinstance(event, kind))
        return next(t for t in times if t >= since_s)

    ready_s = first(events.GeneratorOpened)
    waits = [(step["got_s"] - step["asked_s"], step["got_s"] >= killed_s) for step in notes if "step" in step]
    updates = [note["left_s"] - note["entered_s"] for note in notes if note.get("left_s", 0.0) >= killed_s]
    return {
        "noticed_s": first(events.GeneratorDied),
        "ready_s": ready_s,
        # Between two updates the window may be used up: then no group is to be started.
        **({"dispatched_s": first(events.GroupsDispatched, ready_s)} if row.update_interval == 1 else {}),
        "trainer_waited_s": max(wait for wait, is_after in waits if is_after),
        "before_s": max(wait for wait, is_after in waits[2:] if not is_after),
        **_backlog(log, notes, killed_s, ready_s),
        "update_s": max(updates),
    }


def _backlog(
    log: list[events.Event], notes: list[dict[str, Any]], killed_s: float, ready_s: float
) -> dict[str, float]:
    """What was trained of the groups that were finished when the generator was killed."""
    finished = {e.group for e in log if isinstance(e, events.GroupCommitted) and e.t < killed_s}
    composed = [e for e in log if isinstance(e, events.StepComposed) and e.t >= killed_s]
    steps = {e.step for e in composed if finished >= set(e.groups)}
    waits_s = [note["got_s"] - note["asked_s"] for note in notes if note.get("step") in steps]
    early = [e for e in composed if e.step in steps and e.t < killed_s + ready_s]
    assert steps, "a step must be left in the ring at the kill: nothing is shown else"
    return {
        "backlog_steps": len(steps),
        "backlog_steps_without_generator": len(early),
        "backlog_idle": sum(waits_s) / (sum(waits_s) + TRAIN_S * len(steps)),
    }


def _generator(launcher_pid: int) -> psutil.Process:
    """The one at work is older than its spare."""
    below = psutil.Process(launcher_pid).children(recursive=True)
    lives = [process for process in below if "fa_rollout.generator" in words(process)]
    return min(lives, key=lambda process: process.create_time())


def _await(condition: Any) -> None:
    deadline_s = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "a run must reach its first steps"
        time.sleep(0.02)


def _steps(path: Path) -> list[dict[str, Any]]:
    return [line for line in _lines(path) if "step" in line]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _write_config(folder: Path, row: Row, url: str) -> Path:
    write_tiny_model(folder / "model", characters=CHARACTERS)
    prompts = (json.dumps({"prompt": f"prompt {place}"}) for place in range(1 << 10))
    (folder / "prompts.jsonl").write_text("\n".join(prompts))
    (folder / "user_code.py").write_text(USER_CODE.format(imports=row.imports))
    sections: dict[str, dict[str, Any]] = {
        "data": {"path": str(folder / "prompts.jsonl")},
        "rollout": {
            "num_steps": 14,
            "groups_per_step": GROUPS_PER_STEP,
            "samples_per_group": SAMPLES_PER_GROUP,
            "staleness": STALENESS,
            "update_interval": row.update_interval,
        },
        "reward": {"function": "user_code:reward"},
        "engine": {"urls": [url], "tokenizer": str(folder / "model")},
        "run": {"output_dir": str(folder), "spare_generator": row.spare},
    }
    if row.generate:
        sections["rollout"]["generate"] = "user_code:generate"
    path = folder / "run.toml"
    path.write_text(to_toml(sections))
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """All rows, printed as they come and written as one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--quick", action="store_true", help="fewer rows, one run each")
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.trainer:
        train(options.trainer)
        return
    results = []
    for row in rows(quick=options.quick):
        runs = [measure(row) for _ in range(1 if options.quick else 3)]
        figures = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        worst = {
            f"{name}_max": max(run[name] for run in runs)
            for name in ("dispatched_s", "trainer_waited_s")
            if name in figures
        }
        results.append(asdict(row) | {"results": figures | worst})
        shown = " ".join(f"{name}={value:.3f}" for name, value in (figures | worst).items())
        print(f"{row.name:20} spare={row.spare!s:5} {shown}", flush=True)
    if options.json:
        report = {"benchmark": "restart", "quick": options.quick, "host": host(), "rows": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
