"""The simulator against real runs on the scripted engine, at the same settings: predictions, figures, errors.

    python -m benchmarks.validate_simulation [--json OUT] [--picture OUT.svg] [--quick]

Each setting is run with hub, generator, ring and a trainer that sleeps, then played. The simulator is given
what a user knows: the settings, the engine's rates, the training time, the lengths of the answers (those of
the run, in its order; under `drop` their distribution, since a log knows only answers that were finished),
and the mean time that an update made the engines stand still. Nothing is fitted.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.host import host
from fa_rollout.account.event_file import FILE_NAME, read
from fa_rollout.config import to_toml
from fa_rollout.engines.tiny_model import write_tiny_model
from fa_rollout.records.history import History, histories
from fa_rollout.simulation.model import simulate
from fa_rollout.simulation.outcome import SimulationOutcome, quantile
from fa_rollout.simulation.recorded import scenario_of
from fa_rollout.simulation.scenario import lognormal_lengths
from tests.kit.scripted import Lengths, Script, ScriptedEngine
from trainer_hook import EndOfData, TrainerHook

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz "
MEDIAN_TOKENS, SIGMA, MAX_TOKENS = 80, 0.8, 640
FIGURES = ("step_s", "trainer_idle", "tokens_per_s", "staleness_p50", "staleness_p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One run, and one play."""

    name: str
    staleness: int = 2
    policy: str = "wait"
    partial: str = "resume"
    pause_mode: str = "auto"
    update_interval: int = 1
    surplus_groups: int = 0
    num_slots: int = 32
    num_engines: int = 1
    tokens_per_s: float = 150.0
    total_tokens_per_s: float = 0.0
    prefill_s: float = 0.0
    train_s: float = 0.74
    update_s: float = 0.0
    """For engines to load weights."""


def settings(*, quick: bool) -> list[Setting]:
    """All rows."""
    bounds = (1, 2) if quick else (0, 1, 2, 4)
    rows = [
        Setting(name=f"{policy} {bound}", staleness=bound, policy=policy)
        for policy, bound in itertools.product(("wait", "keep"), bounds)
        if policy == "wait" or bound
    ]
    changed = [
        Setting(name="drop 1", policy="drop", staleness=1),
        Setting(name="drop 0, 4 surplus", policy="drop", staleness=0, surplus_groups=4),
        Setting(name="wait 2, restart", partial="restart", pause_mode="abort"),
        Setting(name="wait 2, 2 steps a version", update_interval=2),
        Setting(name="wait 4, half the slots", staleness=4, num_slots=16),
        Setting(name="wait 4, 2 engines", staleness=4, num_slots=16, num_engines=2),
        Setting(name="wait 2, engines share 2,400/s", total_tokens_per_s=2400.0),
        Setting(name="wait 2, first token after 0.2 s", prefill_s=0.2),
        Setting(name="wait 2, quick trainer", train_s=0.2),
        Setting(name="wait 2, engines load for 0.5 s", update_s=0.5),
        Setting(name="wait 2, load for 0.5 s, restart", update_s=0.5, partial="restart", pause_mode="abort"),
    ]
    return rows + (changed[:1] if quick else changed)


# --- the real run ----------------------------------------------------------------------------------------


def train(train_s: float, update_interval: int) -> None:
    """A trainer that sleeps, in a process of its own."""
    with TrainerHook.attach() as hook:
        try:
            for step in itertools.count(1):
                with hook.next_batch():
                    time.sleep(train_s)
                if step % update_interval == 0:
                    with hook.update_weights():
                        pass
        except EndOfData:
            return


def run(setting: Setting, folder: Path, *, num_steps: int) -> None:
    """A whole run; its log stays in the folder."""
    with ExitStack() as stack:
        engines = [
            stack.enter_context(ScriptedEngine.start(_script(setting, place)))
            for place in range(setting.num_engines)
        ]
        config = _write_config(setting, folder, [engine.url for engine in engines], num_steps)
        trainer = [sys.executable, "-m", "benchmarks.validate_simulation", "--trainer", str(setting.train_s)]
        trainer += ["--interval", str(setting.update_interval)]
        command = [sys.executable, "-m", "fa_rollout.cli", "run", str(config), "--", *trainer]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{setting.name} ended with code {done.returncode}:\n{done.stderr[-2000:]}")


def _script(setting: Setting, place: int) -> Script:
    return Script(
        vocab_size=3 + len(CHARACTERS),
        lengths=Lengths(kind="lognormal", tokens=MEDIAN_TOKENS, sigma=SIGMA, high=MAX_TOKENS, seed=1 + place),
        tokens_per_s=setting.tokens_per_s,
        total_tokens_per_s=setting.total_tokens_per_s,
        prefill_s=setting.prefill_s,
        update_s=setting.update_s,
        max_running=setting.num_slots,
    )


def _write_config(setting: Setting, folder: Path, urls: list[str], num_steps: int) -> Path:
    write_tiny_model(folder / "model", characters=CHARACTERS)
    rows = (json.dumps({"prompt": f"prompt {place}"}) for place in range(1 << 10))
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    path = folder / "run.toml"
    path.write_text(
        to_toml(
            {
                "data": {"path": str(folder / "prompts.jsonl")},
                "rollout": {
                    "num_steps": num_steps,
                    "groups_per_step": 8,
                    "samples_per_group": 4,
                    "staleness": setting.staleness,
                    "staleness_policy": setting.policy,
                    "partial": setting.partial,
                    "update_interval": setting.update_interval,
                    "surplus_groups": setting.surplus_groups,
                },
                "sampling": {"max_new_tokens": MAX_TOKENS},
                "reward": {"function": "benchmarks.endtoend:reward", "in_loop": True},
                "engine": {
                    "urls": urls,
                    "tokenizer": str(folder / "model"),
                    "max_concurrent_samples": setting.num_slots,
                    "pause_mode": setting.pause_mode,
                },
                "run": {"output_dir": str(folder)},
            }
        )
    )
    return path


def measured(history: History) -> dict[str, float]:
    """The figures of `SimulationOutcome.figures`, from a run's log."""
    outcome = SimulationOutcome()
    last_end_s = None
    for step in history.steps.values():
        groups = [history.groups[name] for name in step.groups]
        outcome.staleness += [group.staleness for group in groups if group.staleness is not None]
        ended_s = _ended_s(history, step.trained_s)
        if last_end_s is not None and ended_s is not None:
            outcome.step_s.append(ended_s - last_end_s)
            outcome.wait_s.append(max(part.handed_s - part.asked_s for part in step.ranks.values()))
            outcome.step_tokens.append(sum(sum(group.response_lens) for group in groups))
        last_end_s = ended_s
    return _figures(outcome)


def _ended_s(history: History, trained_s: float | None) -> float | None:
    """A step ends with the update that follows it at once, if there is one."""
    if trained_s is None:
        return None
    following = (u for u in history.updates if 0 <= u.entering_s - trained_s < 0.1)
    return next((update.ended_s for update in following), trained_s)


def _figures(outcome: SimulationOutcome) -> dict[str, float]:
    return {
        "step_s": outcome.mean_step_s,
        "trainer_idle": outcome.trainer_idle,
        "tokens_per_s": outcome.tokens_per_s,
        "staleness_p50": quantile(outcome.staleness, 0.5),
        "staleness_p99": quantile(outcome.staleness, 0.99),
    }


# --- both ------------------------------------------------------------------------------------------------


def compare(setting: Setting, *, num_steps: int) -> dict[str, Any]:
    """One row: measured, simulated."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(setting, folder, num_steps=num_steps)
        history = histories(read(folder / FILE_NAME))[-1]
        scenario = replace(
            scenario_of(folder),
            tokens_per_s=setting.tokens_per_s,
            total_tokens_per_s=setting.total_tokens_per_s,
            prefill_s=setting.prefill_s,
            train_s=setting.train_s,
            write_s=0.0,
        )
    if (
        setting.policy == "drop"
    ):  # what was cancelled has no length: the log knows those that were quick enough
        scenario = replace(scenario, lengths=lognormal_lengths(MEDIAN_TOKENS, SIGMA, 1, MAX_TOKENS))
    found, played = measured(history), _figures(simulate(scenario))
    return asdict(setting) | {"bubble_s": scenario.update_s, "measured": found, "simulated": played}


def errors(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean and worst over all rows: relative for times and rates, absolute for shares and versions."""
    found: dict[str, float] = {}
    for key in FIGURES:
        is_relative = key in ("step_s", "tokens_per_s")
        misses = [
            abs(row["simulated"][key] - row["measured"][key]) / (row["measured"][key] if is_relative else 1.0)
            for row in rows
        ]
        found |= {f"{key}_mean": fmean(misses), f"{key}_worst": max(misses)}
    return found


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Step time and idle over the staleness bound, measured and simulated."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for axis, (key, title) in zip(
        axes, (("step_s", "seconds a step"), ("trainer_idle", "trainer idle")), strict=True
    ):
        for policy, colour in (("wait", "tab:blue"), ("keep", "tab:orange")):
            plain = [row for row in rows if row["name"] == f"{policy} {row['staleness']}"]
            bounds = [row["staleness"] for row in plain]
            for kind, style in (("measured", "o-"), ("simulated", "x--")):
                figures = [row[kind][key] for row in plain]
                axis.plot(bounds, figures, style, color=colour, label=f"{policy}, {kind}")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("staleness bound")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """All rows, printed as they come and written as one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--picture", type=Path, help="where the curves over the staleness bound go")
    parser.add_argument("--quick", action="store_true", help="fewer rows and steps")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows by their names")
    parser.add_argument("--trainer", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--interval", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.trainer is not None:
        train(options.trainer, options.interval)
        return
    rows = []
    for setting in settings(quick=options.quick):
        if re.search(options.only, setting.name):
            rows.append(compare(setting, num_steps=12 if options.quick else 30))
            print(_line(rows[-1]), flush=True)
    found = errors(rows)
    print("errors: " + " ".join(f"{key}={value:.3g}" for key, value in found.items()))
    if options.json:
        report = {"benchmark": "validate_simulation", "quick": options.quick, "host": host()}
        options.json.write_text(json.dumps(report | {"rows": rows, "errors": found}, indent=1) + "\n")
    if options.picture:
        draw(rows, options.picture)


def _line(row: dict[str, Any]) -> str:
    pairs = (f"{key}={row['measured'][key]:.3g}/{row['simulated'][key]:.3g}" for key in FIGURES)
    return f"{row['name']:32} measured/simulated " + " ".join(pairs)


if __name__ == "__main__":
    main()
