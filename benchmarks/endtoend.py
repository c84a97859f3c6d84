"""Whole runs with one trainer and one set of engines, under ways of overlapping the two.

    python -m benchmarks.endtoend [--json OUT] [--quick]

A scripted engine plays answers of lognormal lengths at a set rate a request; the trainer works a set time a
step and publishes after each. All rows have the same settings, so that they differ by the overlap alone:

    synchronous     generate, train, publish, one after the other (a bound of 0 versions)
    one-step-off    the next batch is generated while one is trained, and awaited before weights are published
    wait N, keep N  this system at a staleness bound of N versions, under either policy

The settings are those of the simulator's own scenario (`fa_rollout.simulation`), 19 times as small and as
quick. A perfect overlap takes max(train, generate) a step, `generate` being tokens over slots times rate;
`efficiency` is that over what a step took, and `allowed` the same with the bubbles that were measured, since
in an update engines and trainer stand still together. Steps that count are those of a steady run: not the
first fifth, and not the last ones, beside which no group starts any more; tokens are those of the same steps.
"""

import argparse
import json
import math
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
from benchmarks.launching import run_to_its_end
from fa_rollout.config import to_toml
from fa_rollout.engines.tiny_model import write_tiny_model
from fa_rollout.sample import Sample
from tests.kit.scripted import Lengths, Script, ScriptedEngine
from trainer_hook import EndOfData, TrainerHook

GROUPS_PER_STEP, SAMPLES_PER_GROUP = 8, 4
NUM_SLOTS = 32
TOKENS_PER_S = 150.0
MEDIAN_TOKENS, SIGMA, MAX_TOKENS = 80, 0.8, 437
UPDATE_S = 0.02
TRAIN_S = 0.53
"""By default; engines need 0.7 s for a step."""
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz "
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One row."""

    name: str
    staleness: int
    policy: str = "wait"
    one_step_off: bool = False


def modes(*, quick: bool) -> list[Mode]:
    """All rows of a run."""
    bounds = (2,) if quick else (1, 2, 4)
    return [
        Mode(name="synchronous", staleness=0),
        Mode(name="one-step-off", staleness=1, policy="keep", one_step_off=True),
        *(
            Mode(name=f"{policy} {bound}", staleness=bound, policy=policy)
            for policy in ("wait", "keep")
            for bound in bounds
        ),
    ]


def reward(sample: Sample) -> float:
    """Of no meaning here."""
    return float(len(sample.response_ids))


# --- the trainer, in a process of its own ---------------------------------------------------------------


def train(output: Path, *, one_step_off: bool, train_s: float) -> None:
    """Train every step of the run, and write down what was seen."""
    samples: list[tuple[int, int, int, int, int, int]] = []
    ends_s: list[float] = []
    awaited_s = 0.0
    with TrainerHook.attach() as hook:
        while True:
            try:
                with hook.next_batch() as batch:
                    for sample in batch.samples:
                        versions = [span.version for span in sample.version_spans]
                        row = (sample.group, sample.member, min(versions), max(versions), batch.version)
                        samples.append((*row, sample.response_length))
                    if one_step_off:
                        _start_next(hook)
                    time.sleep(train_s)
                if one_step_off:
                    awaited_s += _await_next(hook)
                with hook.update_weights():
                    pass
            except EndOfData:
                break
            ends_s.append(time.monotonic())
        statistics = hook.statistics()
        waited_s = statistics.wait_s - statistics.first_wait_s + awaited_s
        total_s = statistics.wait_s - statistics.first_wait_s + statistics.train_s
        figures = {
            "trainer_idle": waited_s / total_s,
            "bubble_s": statistics.bubble_s / max(1, len(ends_s)),
            "counts": dict(statistics.hub["counts"]),
        }
    output.write_text(json.dumps({"samples": samples, "ends_s": ends_s} | figures))


def _start_next(hook: TrainerHook) -> None:
    """One batch's groups start, and no others."""
    hook.resume()
    hook.pause()


def _await_next(hook: TrainerHook) -> float:
    """Seconds that it took."""
    started_s = time.monotonic()
    while True:
        counts = hook.statistics().hub["counts"]
        if not counts["issued"] and not counts["running"]:
            return time.monotonic() - started_s
        time.sleep(_LOOK_S)


# --- the measurement --------------------------------------------------------------------------------------


class Utilisation:
    """Share of the engine's slots that are busy, sampled at an even pace."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._shares: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._shares.append(min(1.0, self._engine.state()["num_running"] / NUM_SLOTS))

    def end(self) -> float:
        """The mean while the run lasted; from the first request to the last."""
        self._over.set()
        self._thread.join()
        busy = [place for place, share in enumerate(self._shares) if share]
        return float(np.mean(self._shares[busy[0] : busy[-1] + 1])) if busy else 0.0


def measure(mode: Mode, *, num_steps: int, train_s: float = TRAIN_S) -> dict[str, Any]:
    """One run."""
    lengths = Lengths(kind="lognormal", tokens=MEDIAN_TOKENS, sigma=SIGMA, low=1, high=MAX_TOKENS, seed=1)
    script = Script(
        vocab_size=3 + len(CHARACTERS),
        lengths=lengths,
        tokens_per_s=TOKENS_PER_S,
        max_running=NUM_SLOTS,
        update_s=UPDATE_S,
    )
    with tempfile.TemporaryDirectory() as name, ScriptedEngine.start(script) as engine:
        folder = Path(name)
        config = _write_config(folder, mode, engine.url, num_steps)
        utilisation = Utilisation(engine)
        trainer = [sys.executable, "-m", "benchmarks.endtoend", "--trainer", str(folder / "seen.json")]
        trainer += ["--train", str(train_s), *(["--one-step-off"] if mode.one_step_off else [])]
        command = [sys.executable, "-m", "fa_rollout.cli", "run", str(config), "--", *trainer]
        run_to_its_end(command, folder / "run.log")
        share = utilisation.end()
        return _figures(json.loads((folder / "seen.json").read_text()), mode, share, train_s)


def _write_config(folder: Path, mode: Mode, url: str, num_steps: int) -> Path:
    write_tiny_model(folder / "model", characters=CHARACTERS)
    rows = (json.dumps({"prompt": f"prompt {place}"}) for place in range(1 << 12))
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    sections: dict[str, dict[str, Any]] = {
        "data": {"path": str(folder / "prompts.jsonl")},
        "rollout": {
            "num_steps": num_steps,
            "groups_per_step": GROUPS_PER_STEP,
            "samples_per_group": SAMPLES_PER_GROUP,
            "staleness": mode.staleness,
            "staleness_policy": mode.policy,
        },
        "sampling": {"max_new_tokens": MAX_TOKENS},
        "reward": {"function": "benchmarks.endtoend:reward", "in_loop": True},
        "engine": {
            "urls": [url],
            "tokenizer": str(folder / "model"),
            "max_concurrent_samples": NUM_SLOTS,
        },
        "run": {"output_dir": str(folder)},
    }
    path = folder / "run.toml"
    path.write_text(to_toml(sections))
    return path


def _figures(seen: dict[str, Any], mode: Mode, utilisation: float, train_s: float) -> dict[str, Any]:
    rows, num_steps = np.asarray(seen["samples"]), len(seen["ends_s"])
    oldest, newest, trained, lengths = rows[:, 2], rows[:, 3], rows[:, 4], rows[:, 5]
    first, end = num_steps // 5 + 1, num_steps - mode.staleness - 1
    step_s = np.diff(seen["ends_s"])[first - 1 : end - 1]
    tokens = lengths[(trained >= first) & (trained < end)]  # version k trains step k
    ideal_s = max(train_s, float(tokens.sum()) / (end - first) / (NUM_SLOTS * TOKENS_PER_S))
    counts, samples = seen["counts"], {(group, member) for group, member in rows[:, :2].tolist()}
    num_missing = num_steps * GROUPS_PER_STEP * SAMPLES_PER_GROUP - len(samples)
    return {
        "step_s": float(step_s.mean()),
        "ideal_s": ideal_s,
        "efficiency": ideal_s / float(step_s.mean()),
        "allowed": (ideal_s + seen["bubble_s"]) / float(step_s.mean()),
        "trainer_idle": seen["trainer_idle"],
        "utilisation": utilisation,
        "bubble_s": seen["bubble_s"],
        "in_flight_staleness": _quantiles(newest - oldest),
        "queued_staleness": _quantiles(trained - newest),
        "staleness": _quantiles(trained - oldest),
        "mean_tokens": float(lengths.mean()),
        "repeated": len(rows) - len(samples),
        "lost": counts["failed"] + counts["dropped"] + num_missing,
    }


def _quantiles(values: "np.ndarray[Any, Any]") -> dict[str, int]:
    ordered = sorted(values.tolist())
    return {f"p{q}": ordered[min(len(ordered) - 1, math.ceil(len(ordered) * q / 100))] for q in (50, 99)}


def main(arguments: Sequence[str] | None = None) -> None:
    """All rows, printed as they come and written as one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--quick", action="store_true", help="fewer rows and steps")
    parser.add_argument(
        "--train", type=float, default=TRAIN_S, metavar="S", help="work of the trainer a step"
    )
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--one-step-off", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.trainer:
        train(options.trainer, one_step_off=options.one_step_off, train_s=options.train)
        return
    rows = []
    for mode in modes(quick=options.quick):
        num_steps = _num_steps(mode, quick=options.quick)
        results = measure(mode, num_steps=num_steps, train_s=options.train)
        rows.append(asdict(mode) | {"results": results})
        print(_line(rows[-1]), flush=True)
    if options.json:
        report = {
            "benchmark": "endtoend",
            "quick": options.quick,
            "train_s": options.train,
            "host": host(),
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def _num_steps(mode: Mode, *, quick: bool) -> int:
    """Those that wait for the slowest answer of each step are slow, and steady."""
    if quick:
        return 12
    return 20 if mode.one_step_off or mode.staleness == 0 else 40


def _line(row: dict[str, Any]) -> str:
    return f"{row['name']:13} " + " ".join(f"{key}={_shown(value)}" for key, value in row["results"].items())


def _shown(value: Any) -> str:
    return "/".join(map(str, value.values())) if isinstance(value, dict) else f"{value:.3g}"


if __name__ == "__main__":
    main()
