"""This project's ring against its peers, on the same messages, in one interleaved run.

    python -m benchmarks.transport --json OUT [--peers NAME ...] [--quick] [--passes N]

Each pass measures every contender at every size before the next pass begins, so that a noisy moment hits all.
Writes OUT, and a chart beside it; a peer whose package is missing is left out and named.
"""

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path

from benchmarks.transport import report
from benchmarks.transport.contender import NAMES, OURS, missing_package
from benchmarks.transport.pair import Pair
from benchmarks.transport.results import Key, Results
from benchmarks.transport.workload import SIZES, Form, Size


def main() -> None:
    arguments = _arguments()
    context = multiprocessing.get_context("spawn")
    results = Results()
    pairs: list[Pair] = []
    names = [*OURS, *(name for name in NAMES if name not in OURS and name in arguments.peers)]
    try:
        for name in names:
            pair = _start(name, context, results)
            if pair is not None:
                pairs.append(pair)
        sizes = SIZES[:2] if arguments.quick else SIZES
        for number in range(arguments.passes):
            for pair in pairs:
                print(f"pass {number + 1}/{arguments.passes}: {pair.name}", file=sys.stderr, flush=True)
                for size in filter(pair.takes, sizes):
                    for form in Form:
                        _measure(pair, size, form, results, arguments.seconds)
                        time.sleep(arguments.pause)
        results.touch_us = {(s.name, form): pairs[0].touch_us(s, form) for s in sizes for form in Form}
        for pair in pairs:
            results.idle[pair.name] = pair.idle_cpu(1.0 if arguments.quick else 5.0)
            results.memory[pair.name] = pair.memory()
    finally:
        for pair in pairs:
            pair.close()
    results.load_average = os.getloadavg()[0]
    report.write(results, arguments.json)


def _start(name: str, context: "multiprocessing.context.SpawnContext", results: Results) -> Pair | None:
    package = missing_package(name)
    if package is not None:
        results.left_out[name] = f"package {package} is not installed"
        return None
    try:
        return Pair(name, context)
    except Exception as error:  # a peer that does not start must not end the run
        if name in OURS:
            raise
        results.left_out[name] = f"{type(error).__name__}: {error}"
        return None


def _measure(pair: Pair, size: Size, form: Form, results: Results, seconds: float) -> None:
    key = Key(contender=pair.name, size=size.name, form=form)
    rate = results.rate(key)
    if rate is None:
        rate = pair.stream(size, form, 8).groups_per_s
    num_groups = max(8, min(50_000, int(rate * seconds)))
    results.throughput[key].append(pair.stream(size, form, num_groups))
    num_delays = max(20, int(200 * seconds))
    if size.num_bytes < 4 << 20 or rate > 250:
        results.delays_us[key] += pair.latencies_us(size, form, num_delays)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport", description=__doc__)
    parser.add_argument(
        "--json", type=Path, required=True, help="file for the results; the chart goes beside it"
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        default=list(NAMES),
        choices=NAMES,
        metavar="NAME",
        help="any of: " + ", ".join(n for n in NAMES if n not in OURS),
    )
    parser.add_argument("--passes", type=int, default=None, help="default 5, with --quick 1")
    parser.add_argument(
        "--seconds", type=float, default=None, help="of each measurement; default 1, with --quick 0.2"
    )
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds of rest after each, for the neighbours"
    )
    parser.add_argument("--quick", action="store_true", help="the two small sizes, briefly")
    arguments = parser.parse_args()
    arguments.passes = arguments.passes or (1 if arguments.quick else 5)
    arguments.seconds = arguments.seconds or (0.2 if arguments.quick else 1.0)
    return arguments


if __name__ == "__main__":
    start_s = time.monotonic()
    main()
    print(f"{time.monotonic() - start_s:.0f} s", file=sys.stderr)
