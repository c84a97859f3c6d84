"""`fa-rollout-proc run`: hub, generator and, if configured, engines and trainer."""

import argparse
from collections.abc import Mapping, Sequence

from fa_rollout.config import Config
from fa_rollout.launcher.ending import EXIT_REFUSED
from fa_rollout.preflight import is_fit
from fa_rollout.verbs.configured import add_arguments, configuration

EXAMPLE = """\
a minimal configuration:

  [data]
  path = "prompts.jsonl"             # one {"prompt": ..., "label": ...} per line
  [rollout]
  num_steps = 100
  groups_per_step = 16
  samples_per_group = 8
  staleness = 4                      # staleness limit in weight versions
  [reward]
  function = "my_task:reward"        # def reward(sample) -> float, plain or async
  [engine]
  urls = ["http://127.0.0.1:30000"]  # running SGLang engines; or
  # model = "path/to/model"          # the embedded engine on the CPU
"""


def add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Arguments of `run`."""
    parser = verbs.add_parser(
        "run",
        help="start a run, and optionally its trainer",
        usage="fa-rollout-proc run [CONFIG] [--SECTION.KEY VALUE ...] [-- TRAINER COMMAND ...]",
        description=(
            "Starts the hub, the generator and, if engine.urls is empty, the engines. The command after --\n"
            "is started as the trainer, and TrainerHook.attach() finds the run through the environment.\n"
            "Without a command, the run waits for a trainer, prints the three environment variables that it\n"
            "needs, and keeps running when the trainer restarts."
        ),
        epilog=(
            "examples:\n"
            "  fa-rollout-proc run run.toml -- python -m fa_rollout.ranks 8 train.py\n"
            "  fa-rollout-proc run run.toml --rollout.staleness 2 --ring.bytes 8GiB -- python train.py\n"
            "  fa-rollout-proc run run.toml\n"
            "  fa-rollout-proc doctor run.toml      # check everything first\n"
            "  fa-rollout-proc run --help-keys staleness\n\n" + EXAMPLE
        ),
    )
    add_arguments(parser)
    parser.set_defaults(call=call, takes_command=True, starts_a_run=True)


def call(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Run, and return the exit code."""
    return start(configuration(options), command)


def start(config: Config, command: Sequence[str]) -> int:
    """Run a checked configuration, and return the exit code."""
    if not is_fit(config, command):
        return EXIT_REFUSED
    from fa_rollout.launcher.launch import Seat, launch

    seat = Seat() if command else Seat(ready=_tell_trainers)
    return launch(config, command, seat=seat).exit_code


def _tell_trainers(environment: Mapping[str, str]) -> None:
    print("# Set these variables for the trainer:")
    for name, value in environment.items():
        print(f"export {name}={value}")
    print("# Press Ctrl-C to end the run.", flush=True)
