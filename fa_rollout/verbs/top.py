"""`fa-rollout-proc top`: a live, read-only view of an active run."""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa_rollout.observe.observer import Observer, RunOver

_ANSWER_S = 15.0


def add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Arguments of `top`."""
    parser = verbs.add_parser(
        "top",
        help="watch an active run",
        usage="fa-rollout-proc top [RUN] [--once] [--json] [--every SECONDS]",
        description=(
            "Shows whether a run is healthy and, if not, why: what the trainer waits for, engine load,\n"
            "staleness, ring use, who waits for whom, what takes longest and what failed. Read-only; works\n"
            "while the trainer is stuck, and exits when the run ends. Press q to quit."
        ),
        epilog=(
            "examples:\n"
            "  fa-rollout-proc top                       # your active run, or a list if there are several\n"
            "  fa-rollout-proc top out/my-run            # by output folder, name or launcher PID\n"
            "  fa-rollout-proc top --once                # print the state once, for a log\n"
            "  fa-rollout-proc top --once --json | jq .trainer.recent\n"
        ),
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="run name or its beginning, run.output_dir or launcher PID; needed if several runs are active",
    )
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    parser.add_argument("--json", action="store_true", help="print snapshots as JSON, one per line")
    parser.add_argument(
        "--every", type=_interval, default=1.0, metavar="SECONDS", help="time between updates (default: 1)"
    )
    parser.set_defaults(call=call)


def call(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Watch, and return the exit code."""
    from rich.console import Console

    from fa_rollout.launcher.running import find
    from fa_rollout.observe.observer import Observer
    from fa_rollout.observe.top import View, follow, watch
    from trainer_hook.printable import printable

    console = Console(highlight=False)
    with Observer(find(options.run)) as observer:
        if options.json:
            return _print_json(observer, once=options.once, interval_s=options.every)
        if options.once:
            view = View(console)
            view.take(observer.snapshot(_ANSWER_S))
            console.print(view.text())
            return 0
        if console.is_terminal and not console.is_dumb_terminal:
            over = watch(observer, console, interval_s=options.every)
        else:
            over = follow(observer, console, interval_s=options.every)
    if over is not None:
        console.print(printable(_last_words(over), lines=True), markup=False, soft_wrap=True)
    return 0


def _print_json(observer: "Observer", *, once: bool, interval_s: float) -> int:
    import msgspec

    from fa_rollout.observe.observer import RunOver
    from trainer_hook.printable import printable_json

    try:
        while True:
            text = msgspec.json.encode(observer.snapshot(_ANSWER_S)).decode()
            sys.stdout.write(printable_json(text) + "\n")
            sys.stdout.flush()
            if once:
                return 0
            time.sleep(interval_s)
    except (RunOver, BrokenPipeError):
        return 0


def _last_words(over: "RunOver") -> str:
    if over.ended is None:
        return str(over)
    counts = ", ".join(f"{count} {name}" for name, count in over.ended.counts.items())
    return f"the run has ended (exit code {over.ended.exit_code}): {over.ended.text}\nprompts: {counts}"


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value < 0.1:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, 0.1 or more, found {text!r}")
    return value
