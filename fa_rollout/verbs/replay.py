"""`fa-rollout-proc replay`: the steps of a recorded run, given out again."""

import argparse
from collections.abc import Sequence

from fa_rollout.hub.flow.replay import read
from fa_rollout.verbs.configured import add_arguments, change, configuration, path
from fa_rollout.verbs.run import start


def add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Arguments of `replay`."""
    parser = verbs.add_parser(
        "replay",
        help="give the steps of a recorded run out again",
        usage="fa-rollout-proc replay LOG [CONFIG] [--SECTION.KEY VALUE ...] [-- TRAINER COMMAND ...]",
        description=(
            "Rolls out again and trains the same groups in the same steps, on the same ranks in the same\n"
            "order. Data, reward and filter must be those of the recorded run; tokens are sampled anew\n"
            "unless the engine's sampling seeds make them the same."
        ),
        epilog="example:\n  fa-rollout-proc replay out/events.jsonl run.toml -- torchrun ... train.py",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("log", metavar="LOG", type=path, help="the run's events.jsonl, in its run.output_dir")
    add_arguments(parser)
    parser.set_defaults(call=call, takes_command=True, starts_a_run=True)


def call(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Run, and return the exit code."""
    change(options, "run", replay=str(options.log))
    config = configuration(options)
    read(options.log)  # what is no log is refused here, before anything is started
    return start(config, command)
