"""`token_logprobs` against the plain way: time and peak memory, forward and backward, at a large vocabulary.

    python -m benchmarks.losses --json OUT [--quick]

The plain way is `(logits.float() / temperature).log_softmax(-1).gather(...)`. The two run in turn, each time
in a process of its own; medians are reported. Memory is the growth of the process, logits and their gradient
included.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

from trainer_hook.losses import selected_logprobs

WAYS = ("plain", "ours")
TEMPERATURE = 0.7


def measure(way: str, num_tokens: int, vocabulary: int, dtype: torch.dtype) -> dict[str, float]:
    """Seconds and peak bytes of one forward and backward pass."""
    torch.manual_seed(0)
    ids = torch.randint(vocabulary, (num_tokens,))
    rows = torch.arange(num_tokens)
    before = _reset_peak()
    logits = torch.randn(num_tokens, vocabulary, dtype=dtype).requires_grad_()
    began_s = time.perf_counter()
    if way == "ours":
        found = selected_logprobs(logits, rows, ids, temperatures=TEMPERATURE)
    else:
        found = (logits.float() / TEMPERATURE).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    found.sum().backward()
    return {"seconds": time.perf_counter() - began_s, "bytes": _status("VmHWM") - before}


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tenth of the tokens, one repeat")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    num_tokens, vocabulary = (100 if options.quick else 1024), 150_000
    if options.way:
        print(json.dumps(measure(options.way, num_tokens, vocabulary, getattr(torch, options.dtype))))
        return
    rows = []
    for dtype in ("float32", "bfloat16"):
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(1 if options.quick else 5):
            for way in WAYS:
                command = [sys.executable, "-m", "benchmarks.losses", "--way", way, "--dtype", dtype]
                done = subprocess.run(
                    command + ["--quick"] * options.quick, capture_output=True, text=True, check=True
                )
                runs[way].append(json.loads(done.stdout))
        plain, ours = ({key: median(run[key] for run in runs[way]) for key in runs[way][0]} for way in WAYS)
        row = {"dtype": dtype, "plain": plain, "ours": ours}
        row["time_ratio"], row["memory_ratio"] = (ours[key] / plain[key] for key in ("seconds", "bytes"))
        rows.append(row)
        print(
            f"{dtype}: {ours['seconds']:.2f} s against {plain['seconds']:.2f} s ({row['time_ratio']:.2f}), "
            f"{ours['bytes'] / 2**30:.2f} GiB against {plain['bytes'] / 2**30:.2f} GiB "
            f"({row['memory_ratio']:.2f})"
        )
    if options.json:
        machine = {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        result = {"tokens": num_tokens, "vocabulary": vocabulary, "rows": rows, **machine}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
