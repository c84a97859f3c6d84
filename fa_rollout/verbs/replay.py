"""`fa-rollout-proc replay`: repeats the steps of a recorded run."""

import argparse
from collections.abc import Sequence

from fa_rollout.hub.flow.replay import read
from fa_rollout.verbs.configured import add_arguments, change, configuration, path
from fa_rollout.verbs.run import start


def add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Arguments of `replay`."""
    parser = verbs.add_parser(
        "replay",
        help="repeat the steps of a recorded run",
        usage="fa-rollout-proc replay LOG [CONFIG] [--SECTION.KEY VALUE ...] [-- TRAINER COMMAND ...]",
        description=(
            "Trains the same groups in the same steps, on the same ranks and in the same order as a\n"
            "recorded run. Data, reward and filter must be the same as in that run. Tokens are sampled\n"
            "again and are the same only if the engine reproduces them from sampling.seed."
        ),
        epilog="example:\n  fa-rollout-proc replay out/events.jsonl run.toml -- torchrun ... train.py",
    )
    parser.add_argument(
        "log", metavar="LOG", type=path, help="events.jsonl from the recorded run's run.output_dir"
    )
    add_arguments(parser)
    parser.set_defaults(call=call, takes_command=True, starts_a_run=True)


def call(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Run, and return the exit code."""
    change(options, "run", replay=str(options.log))
    config = configuration(options)
    read(options.log)  # refuse a file that is not a log before anything is started
    return start(config, command)
