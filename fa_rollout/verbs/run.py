"""`fa-rollout-proc run`: hub, generator and, where it is wanted, engine and trainer."""

import argparse
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from fa_rollout.config import Config, load
from fa_rollout.launcher.ending import EXIT_REFUSED
from fa_rollout.preflight import is_fit

EXAMPLE = """\
the smallest configuration:

  [data]
  path = "prompts.jsonl"             # one {"prompt": ..., "label": ...} a line
  [rollout]
  num_steps = 100
  groups_per_step = 16
  samples_per_group = 8
  staleness = 4                      # how many weight versions a sample may be old when it is trained
  [reward]
  function = "my_task:reward"        # def reward(sample) -> float, plain or async
  [engine]
  urls = ["http://127.0.0.1:30000"]  # running SGLang engines; or
  # model = "path/to/model"          # the embedded engine, on the CPU
"""


def add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Arguments of `run`."""
    parser = verbs.add_parser(
        "run",
        help="start a run from a configuration, and a trainer beside it",
        usage="fa-rollout-proc run CONFIG [-- TRAINER COMMAND ...]",
        description=(
            "Starts the hub, the generator and, where the configuration names no engine, the embedded one.\n"
            "What follows -- is started as the trainer and finds the run by its environment\n"
            "(TrainerHook.attach() reads it). Without a trainer the run waits for one: the three variables\n"
            "that it needs are printed, and the run outlives its restarts."
        ),
        epilog=f"examples:\n  fa-rollout-proc run run.toml -- torchrun --nproc-per-node 8 train.py\n"
        f"  fa-rollout-proc run run.toml\n\n{EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="a TOML file")
    parser.add_argument("--shard", type=_shard, metavar="I/N", help="prompts of node I of N (data.shard)")
    parser.add_argument("--replay", metavar="LOG", help="give a recorded run's steps out again (run.replay)")
    parser.set_defaults(call=call, takes_command=True)


def call(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Run, and return the exit code."""
    config = configuration(options)
    if not is_fit(config, command):
        return EXIT_REFUSED
    from fa_rollout.launcher.launch import Seat, launch

    seat = Seat() if command else Seat(ready=_tell_trainers)
    return launch(config, command, seat=seat).exit_code


def configuration(options: argparse.Namespace) -> Config:
    """The file's configuration, changed by what the command line says."""
    config = load(options.config)
    if options.shard is not None:
        shard, num_shards = options.shard
        data = replace(config.data, shard=shard, num_shards=num_shards)
        config = replace(config, data=data)
    if options.replay is not None:
        config = replace(config, run=replace(config.run, replay=options.replay))
    return config


def _tell_trainers(environment: Mapping[str, str]) -> None:
    print("# A trainer of this run needs these in its environment:")
    for name, value in environment.items():
        print(f"export {name}={value}")
    print("# Ctrl-C ends the run.", flush=True)


def _shard(text: str) -> tuple[int, int]:
    shard, _, num_shards = text.partition("/")
    if not (shard.isdigit() and num_shards.isdigit() and int(shard) < int(num_shards)):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 0 to N - 1, found {text!r}")
    return int(shard), int(num_shards)
