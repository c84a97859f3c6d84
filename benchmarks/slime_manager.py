"""A rollout manager that counts between its calls: run by `benchmarks.slime`, in slime's interpreter.

python -m benchmarks.slime_manager ROUTER STEPS -- OPTIONS OF SLIME'S
"""

import json
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from slime.rollout.base_types import call_rollout_fn
from slime.utils.arguments import parse_args
from slime.utils.http_utils import init_http_client
from slime.utils.misc import load_function

COUNT_S = 1.0
BEFORE = 2
"""Steps that are not counted: the start."""


def main() -> None:
    """All calls, with a second of counting after each."""
    router, num_steps = sys.argv[1], int(sys.argv[2])
    sys.argv = ["train_async.py", *sys.argv[4:]]
    args = parse_args()
    args.sglang_router_ip, port = router.removeprefix("http://").split(":")
    args.sglang_router_port = int(port)
    init_http_client(args)
    source = load_function(args.data_source_path)(args)
    generate = load_function(args.rollout_function_path)
    alone = [count() for _ in range(3)]
    beside: list[Count] = []
    cpu_s, num_samples = 0.0, 0
    for step in range(num_steps):
        begun_s = tree_cpu_s()
        groups = call_rollout_fn(generate, args, step, source, evaluation=False).samples
        one = count()
        if step >= BEFORE:
            beside.append(one)
            cpu_s += tree_cpu_s() - begun_s - one.cpu_s
            num_samples += sum(len(group) for group in groups)
    rate_alone = max(one.turns / one.own_s for one in alone)
    rate_beside = sum(one.turns for one in beside) / sum(one.own_s for one in beside)
    told = {
        "lost": 1 - sum(one.cpu_s for one in beside) / sum(one.own_s for one in beside),
        "slower": 1 - rate_beside / rate_alone,
        "cpu_ms_per_sample": 1e3 * cpu_s / num_samples,
    }
    print("LOST", json.dumps(told), flush=True)


@dataclass(frozen=True, slots=True)
class Count:
    """A second of counting."""

    turns: int
    own_s: float
    """What passed, but for the time that the thread was ready and the kernel did not let it run."""
    cpu_s: float
    """In which it ran; the rest it stood at the interpreter's lock."""


def count() -> Count:
    """Turn a loop for a second."""
    turns, kept_waiting_s = 0, run_queue_s()
    begun_s, begun_cpu_s = time.monotonic(), time.thread_time()
    while time.monotonic() - begun_s < COUNT_S:
        for _ in range(1000):
            turns += 1
    cpu_s = time.thread_time() - begun_cpu_s
    own_s = time.monotonic() - begun_s - (run_queue_s() - kept_waiting_s)
    return Count(turns, own_s, cpu_s)


def run_queue_s() -> float:
    """Seconds that this thread was ready to run and was not let."""
    text = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
    return int(text.split()[1]) / 1e9


def tree_cpu_s() -> float:
    """CPU seconds of this process and those below it."""
    own = psutil.Process()
    times = [process.cpu_times() for process in [own, *_children(own)]]
    return sum(one.user + one.system for one in times)


def _children(process: psutil.Process) -> list[Any]:
    return [child for child in process.children(recursive=True) if child.is_running()]


if __name__ == "__main__":
    main()
