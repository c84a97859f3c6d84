"""Flow control on a virtual clock: what each staleness policy costs at each bound, by the run's own code.

    python -m benchmarks.flow --json OUT [--quick]

Seconds a step, share of time that the trainer waits, staleness of what was trained, and trained against
drawn answer lengths (0 is no bias), for answers of about 2,000 tokens whose lengths spread widely. Engines
are a decode rate and a number of places, a training step is one second: only comparisons mean something.
"""

import argparse
import itertools
import json
import platform
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from fa_rollout.simulation.model import simulate
from fa_rollout.simulation.outcome import SimulationOutcome
from fa_rollout.simulation.scenario import Scenario

POLICIES = ("wait", "drop", "retry", "mask", "keep")
BOUNDS = (1, 2, 4)

DESIGN_STEP_S = {"wait": (2.80, 1.96, 1.36), "keep": (2.03, 1.39, 1.33), "drop": (2.28, 1.64, 1.38)}
"""Seconds a step at each of `BOUNDS` in the study that the policies were designed by: another model of
engines, so that the order of the policies should agree, and the figures about."""


def rows(*, quick: bool) -> list[Scenario]:
    """Every policy at every bound; then resume against restart, over-sampling, rejection."""
    num_steps, seeds = (60, (0,)) if quick else (200, (0, 1, 2))
    plain = [
        Scenario(num_steps=num_steps, staleness=bound, staleness_policy=policy, seed=seed)
        for policy, bound, seed in itertools.product(POLICIES, BOUNDS, seeds)
    ]
    changed = [
        Scenario(num_steps=num_steps, staleness=bound, staleness_policy=policy, seed=seed, **change)
        for (policy, bound, change), seed in itertools.product(
            (
                ("wait", 4, {"partial": "restart"}),
                ("wait", 4, {"rejection": 0.5}),
                ("drop", 0, {}),
                ("drop", 0, {"surplus_groups": 4}),
            ),
            seeds,
        )
    ]
    return plain + changed


def figures(outcome: SimulationOutcome) -> dict[str, float]:
    """What a simulated run showed."""
    dropped = outcome.dropped_lengths
    return {
        "step_s": outcome.mean_step_s,
        "trainer_idle": outcome.trainer_idle,
        "staleness_mean": fmean(outcome.staleness),
        "staleness_max": max(outcome.staleness),
        "length_bias": outcome.length_bias,
        "dropped_share": len(dropped) / (len(dropped) + len(outcome.trained_lengths)),
        "dropped_length_ratio": fmean(dropped) / fmean(outcome.trained_lengths) if dropped else 0.0,
    }


def name_of(scenario: Scenario) -> str:
    """A row's name: what differs from the plain scenario."""
    parts = [f"{scenario.staleness_policy:5} eta={scenario.staleness}"]
    parts += ["restart"] if scenario.partial == "restart" else []
    parts += [f"rejection={scenario.rejection:g}"] if scenario.rejection else []
    parts += [f"surplus={scenario.surplus_groups}"] if scenario.surplus_groups else []
    return " ".join(parts)


def measure(*, quick: bool) -> list[dict[str, Any]]:
    """One row a setting, its seeds averaged; printed as they come."""
    found: list[dict[str, Any]] = []
    for name, scenarios in itertools.groupby(rows(quick=quick), key=name_of):
        outcomes = [figures(simulate(scenario)) for scenario in scenarios]
        mean = {key: fmean(outcome[key] for outcome in outcomes) for key in outcomes[0]}
        found.append({"name": name, "num_seeds": len(outcomes)} | mean | _design(name))
        print(_line(found[-1]), flush=True)
    return found


def _design(name: str) -> dict[str, float]:
    policy, _, rest = name.partition(" ")
    for bound, step_s in zip(BOUNDS, DESIGN_STEP_S.get(policy, ()), strict=False):
        if rest.strip() == f"eta={bound}":
            return {"design_step_s": step_s}
    return {}


def _line(row: dict[str, Any]) -> str:
    design = f"  (design {row['design_step_s']:.2f})" if "design_step_s" in row else ""
    return (
        f"{row['name']:26} {row['step_s']:5.2f} s/step  idle {row['trainer_idle']:4.0%}  "
        f"staleness {row['staleness_mean']:.2f} max {row['staleness_max']:.0f}  "
        f"length {row['length_bias']:+5.1%}  dropped {row['dropped_share']:4.0%} "
        f"(x{row['dropped_length_ratio']:.1f} long){design}"
    )


def main() -> None:
    """All rows, printed as they come and written as one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--quick", action="store_true", help="shorter runs, one seed")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    found = measure(quick=arguments.quick)
    if arguments.json:
        report = {
            "benchmark": "flow",
            "quick": arguments.quick,
            "host": {"python": platform.python_version()},
            "elapsed_s": time.monotonic() - began_s,
            "rows": found,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
