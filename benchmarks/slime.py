"""What the Python of slime's rollout manager loses to generation: with slime's fully-async function and ours.

    python -m benchmarks.slime CHECKOUT PYTHON [--json OUT] [--rounds N]

CHECKOUT and PYTHON as for `scripts/check_slime`. Both functions run alternately in a process like the
manager's, against one scripted engine each, at the same rate. Between its calls the process counts in a loop,
as any Python of its own would. `lost` is the share of its time that it stood at the interpreter's lock; time
in which the kernel let others have the core is left out. `slower` is how much less it counted in it than
alone, to which whatever shares the core's caches adds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.kit.scripted import Lengths, Script, ScriptedEngine

FUNCTIONS = {
    "slime": "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
    "fa_rollout": "fa_rollout.entry",
}
BATCH, NUM_SAMPLES = 8, 4
NUM_TOKENS, TOKENS_PER_S, CONCURRENCY = 4096, 2048.0, 64
"""32 answers a second: a step's worth in about each second of counting."""
STEPS = 12


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all rounds, and tell the medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slime")
    parser.add_argument("checkout")
    parser.add_argument("python")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    os.environ["FA_ROLLOUT_SLIME_DIR"] = options.checkout
    os.environ["FA_ROLLOUT_SLIME_PYTHON"] = options.python
    from tests.slime.real.checkout import write_model

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        for _ in range(options.rounds):
            for name, function in FUNCTIONS.items():
                rows.append({"function": name, **play(function, model, options.python)})
                print(json.dumps(rows[-1]), flush=True)
    for name in FUNCTIONS:
        own = [row for row in rows if row["function"] == name]
        lost, slower = (statistics.median(row[key] for row in own) for key in ("lost", "slower"))
        cpu_ms = statistics.median(row["cpu_ms_per_sample"] for row in own)
        print(f"{name:12} lost {lost:6.1%}, slower {slower:6.1%}, {cpu_ms:6.2f} ms CPU a sample")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


def play(function: str, model: Path, python: str) -> dict[str, Any]:
    """One life of a manager."""
    from tests.slime.real.checkout import environment, options

    script = Script(
        protocol="0.5.15",
        vocab_size=300,
        lengths=Lengths(tokens=NUM_TOKENS),
        tokens_per_s=TOKENS_PER_S,
    )
    with (
        ScriptedEngine.start(script) as engine,
        ScriptedEngine.start(Script(workers=[engine.url], router_drops=False)) as router,
    ):
        words = [python, "-m", "benchmarks.slime_manager", router.url, str(STEPS), "--"]
        words += options(model, batch=BATCH, num_samples=NUM_SAMPLES)
        words += ["--rollout-external-engine-addrs", engine.url.removeprefix("http://")]
        words += ["--sglang-server-concurrency", str(CONCURRENCY), "--num-rollout", str(STEPS)]
        words += ["--rollout-max-response-len", "8192", "--rollout-function-path", function]
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOST ")]
    if not lines:
        raise RuntimeError(f"the manager must tell what it lost, found {done.stdout}{done.stderr}"[-4000:])
    told: dict[str, Any] = json.loads(lines[-1].removeprefix("LOST "))
    return told


if __name__ == "__main__":
    sys.exit(main())
