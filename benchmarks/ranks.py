"""What a batch costs a rank, and the hub, when one ring serves more and more ranks.

    python -m benchmarks.ranks [--json OUT] [--quick]

One run for each number of ranks; a rank's share of a step is the same in all of them. Ranks attach, take
their part of each step, read every token and give it back. CPU time is what is compared, since ranks that
share a core wait for one another:

    rank      microseconds of a rank's own CPU for one batch: asking, mapping, reading, releasing
    hub       microseconds of the hub's CPU for each rank's part, its groups' commits included
    handover  milliseconds from a rank's request to its part, by the clock, when groups are ready (median)
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.host import host
from benchmarks.launching import run_to_its_end, words
from fa_rollout.config import to_toml
from fa_rollout.engines.tiny_model import write_tiny_model
from fa_rollout.sample import Sample
from tests.kit.scripted import Lengths, Script, ScriptedEngine
from trainer_hook import EndOfData, TrainerHook

GROUPS_PER_RANK, SAMPLES_PER_GROUP = 4, 4
NUM_TOKENS = 512
NUM_WARM = 5
"""Steps that are not counted."""
TRAIN_S = 0.05
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz "


def reward(sample: Sample) -> float:
    """Of no meaning here."""
    return float(len(sample.response_ids))


# --- the trainer, in processes of its own ----------------------------------------------------------------


def agent(folder: Path, num_ranks: int) -> int:
    """Start the ranks and wait for them."""
    command = [sys.executable, "-m", "benchmarks.ranks", "--folder", str(folder), "--ranks", str(num_ranks)]
    ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(num_ranks)]
    return max(rank.wait() for rank in ranks)


def work(folder: Path, rank: int, num_ranks: int) -> None:
    """One rank: what each batch took it, and the hub's CPU time before and after the counted ones."""
    steps: list[dict[str, float]] = []
    hub_s: list[float] = []
    with TrainerHook.attach(dp_rank=rank, dp_size=num_ranks) as hook:
        hub = _hub()
        while True:
            if len(steps) in (NUM_WARM, hook.run.num_steps):
                hub_s.append(sum(hub.cpu_times()[:2]))
            cpu_s, wall_s = time.process_time(), time.monotonic()
            try:
                with hook.next_batch() as batch:
                    got_s = time.monotonic()
                    sums = [int(sample.tokens.sum()) for sample in batch.samples]
                steps.append(
                    {
                        "cpu_s": time.process_time() - cpu_s,
                        "wait_s": got_s - wall_s,
                        "num_samples": len(sums),
                    }
                )
            except EndOfData:
                break
            time.sleep(TRAIN_S)
    note = {"steps": steps, "hub_s": hub_s}
    (folder / f"rank-{rank}.json").write_text(json.dumps(note))


def _hub() -> psutil.Process:
    """The launcher is above this agent, and the hub below it."""
    launcher = psutil.Process().parent().parent()
    (hub,) = [child for child in launcher.children() if "fa_rollout.hub" in words(child)]
    return hub


# --- the measurement ---------------------------------------------------------------------------------------


def measure(num_ranks: int, num_steps: int) -> dict[str, float]:
    """One run."""
    script = Script(vocab_size=3 + len(CHARACTERS), lengths=Lengths(tokens=NUM_TOKENS), tokens_per_s=4000.0)
    with tempfile.TemporaryDirectory() as name, ScriptedEngine.start(script) as engine:
        folder = Path(name)
        config = _write_config(folder, engine.url, num_ranks, num_steps)
        command = [sys.executable, "-m", "fa_rollout.cli", "run", str(config), "--"]
        command += [sys.executable, "-m", "benchmarks.ranks", "--folder", name, "--ranks", str(num_ranks)]
        run_to_its_end(command, folder / "run.log")
        notes = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]
    counted = [step for note in notes for step in note["steps"][NUM_WARM:]]
    begin_s, end_s = (min(values) for values in zip(*(note["hub_s"] for note in notes), strict=True))
    return {
        "rank_us": 1e6 * statistics.median(step["cpu_s"] for step in counted),
        "hub_us": 1e6 * (end_s - begin_s) / len(counted),
        "handover_ms": 1e3 * statistics.median(step["wait_s"] for step in counted),
        "samples": statistics.mean(step["num_samples"] for step in counted),
    }


def _write_config(folder: Path, url: str, num_ranks: int, num_steps: int) -> Path:
    write_tiny_model(folder / "model", characters=CHARACTERS)
    rows = (json.dumps({"prompt": f"prompt {place}"}) for place in range(1 << 10))
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    sections: dict[str, dict[str, Any]] = {
        "data": {"path": str(folder / "prompts.jsonl")},
        "rollout": {
            "num_steps": num_steps,
            "groups_per_step": GROUPS_PER_RANK * num_ranks,
            "samples_per_group": SAMPLES_PER_GROUP,
            "update_interval": num_steps,
            "staleness": 4,
            "staleness_policy": "keep",
        },
        "sampling": {"max_new_tokens": NUM_TOKENS},
        "reward": {"function": "benchmarks.ranks:reward", "in_loop": True},
        "engine": {"urls": [url], "tokenizer": str(folder / "model")},
        "trainer": {"num_ranks": num_ranks},
    }
    path = folder / "run.toml"
    path.write_text(to_toml(sections))
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """All rows, printed as they come and written as one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--quick", action="store_true", help="fewer rows and steps")
    for name, kind in (("--folder", Path), ("--ranks", int), ("--rank", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        work(options.folder, options.rank, options.ranks)
        return 0
    if options.folder is not None:
        return agent(options.folder, options.ranks)
    rows = []
    for num_ranks in (1, 4) if options.quick else (1, 2, 4, 8):
        results = measure(num_ranks, 20 if options.quick else 60)
        rows.append({"ranks": num_ranks, "results": results})
        shown = " ".join(f"{name}={value:.1f}" for name, value in results.items())
        print(f"ranks={num_ranks} {shown}", flush=True)
    if options.json:
        report = {"benchmark": "ranks", "quick": options.quick, "host": host(), "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
