"""`fa-rollout-proc run` and `replay`: hub, generator and, if configured, engines and trainer."""

import argparse
from collections.abc import Mapping, Sequence

from fa_rollout.config import Config
from fa_rollout.hub.flow.replay import read
from fa_rollout.launcher.ending import EXIT_REFUSED
from fa_rollout.preflight import is_fit
from fa_rollout.verbs.configured import add_arguments, change, configuration, path

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
    return _start(configuration(options), command)


def add_replay(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
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
    parser.set_defaults(call=replay, takes_command=True, starts_a_run=True)


def replay(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Run, and return the exit code."""
    change(options, "run", replay=str(options.log))
    config = configuration(options)
    read(options.log)  # refuse a file that is not a log before anything is started
    return _start(config, command)


def _start(config: Config, command: Sequence[str]) -> int:
    """Run a checked configuration, and return the exit code."""
    if not is_fit(config, command):
        return EXIT_REFUSED
    from fa_rollout.launcher.launch import LaunchHooks, launch

    hooks = LaunchHooks() if command else LaunchHooks(ready=_tell_trainers)
    return launch(config, command, hooks=hooks).exit_code


def _tell_trainers(environment: Mapping[str, str]) -> None:
    print("# Set these variables for the trainer:")
    for name, value in environment.items():
        print(f"export {name}={value}")
    print("# Press Ctrl-C to end the run.", flush=True)
