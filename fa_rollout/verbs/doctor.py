"""`fa-rollout-proc doctor`: checks everything that a run depends on."""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from fa_rollout.launcher.ending import EXIT_REFUSED
from fa_rollout.verbs.configured import add_arguments, configuration, seconds


def add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Arguments of `doctor`."""
    parser = verbs.add_parser(
        "doctor",
        help="check everything that a run depends on, and show how to fix it",
        usage="fa-rollout-proc doctor [CONFIG] [--SECTION.KEY VALUE ...] [-- TRAINER COMMAND ...]",
        description=(
            "Runs all checks that `run` makes before it starts, and more: queries the engines and samples\n"
            "an answer, encodes the prompts and shows the first ones as they will be sent, imports the\n"
            "reward, filter and generate functions, and scores a group. Exits with 2 if there are errors."
        ),
        epilog="example:\n  fa-rollout-proc doctor run.toml -- python -m fa_rollout.ranks 8 train.py",
    )
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of the table")
    parser.add_argument(
        "--patience",
        type=seconds,
        default=10.0,
        metavar="T",
        help="longest wait for an engine to answer, such as 30s (default: 10s)",
    )
    parser.add_argument(
        "--start-engine",
        action=argparse.BooleanOptionalAction,
        help="if engine.urls is empty, start one of the engines that the run would start and check it "
        "(default: yes for the embedded engine, no for SGLang)",
    )
    parser.set_defaults(call=call, takes_command=True)


def call(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Run the checks, and return the exit code."""
    config = configuration(options)
    from rich.console import Console

    from fa_rollout.doctor.examination import examination
    from fa_rollout.doctor.outcome import CheckStatus
    from fa_rollout.doctor.show import as_json, show

    starts = config.launch.server == "embedded" if options.start_engine is None else options.start_engine
    work = examination(config, command, patience_s=options.patience, starts_engine=starts)
    with _quiet_stdout() if options.json else nullcontext():
        outcomes = asyncio.run(work)
    if options.json:
        print(as_json(outcomes))
    else:
        show(outcomes, Console(highlight=False))
    return EXIT_REFUSED if any(outcome.status is CheckStatus.ERROR for outcome in outcomes) else 0


@contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Send what user code prints, here or in worker processes, to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
