"""`fa-rollout-proc`: the command line.

In: arguments. Out: an exit code of `launcher.ending.EXIT_CODES`. Invariant: a mistake of the user's ends in
one message without a traceback and before anything has been started.
"""

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from msgspec.structs import replace

from fa_rollout.config import Config, load
from fa_rollout.launcher.ending import EXIT_CODES, EXIT_REFUSED
from fa_rollout.preflight import Severity, preflight
from fa_rollout.version import __version__
from shm.errors import FaRolloutError

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_MODEL_HELP = """tiny: two layers from random weights, about two minutes; smollm2: SmolLM2-135M-Instruct,
slow on a CPU"""
_ENGINE_HELP = """embedded, sglang (a real one on the CPU, see scripts/sglang_cpu), or sglang:URL of a running
engine that serves the model folder of --output"""
_STALENESS_HELP = "weight versions that a sample may be old when it is trained (default: the task's own)"
_EXAMPLE = """\
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    own, command = _split(words)
    options = _parser().parse_args(own)
    if command and options.verb != "run":
        _refuse(f"a trainer's command after -- goes with `run` only, found {' '.join(command)!r}")
    logging.basicConfig(level=options.log_level.upper(), format=_LOG_FORMAT)
    try:
        return _demo(options) if options.verb == "demo" else _run(options, command)
    except (FaRolloutError, OSError) as error:
        _refuse(str(error))


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Own words, and the trainer's command after the first `--`."""
    if "--" not in words:
        return words, []
    cut = words.index("--")
    return words[:cut], words[cut + 1 :]


def _refuse(text: str) -> NoReturn:
    print(f"fa-rollout-proc: {text}", file=sys.stderr)
    raise SystemExit(EXIT_REFUSED)


def _run(options: argparse.Namespace, command: list[str]) -> int:
    config = _with_options(load(options.config), options)
    if not is_fit(config, command):
        return EXIT_REFUSED
    from fa_rollout.launcher.launch import Seat, launch

    seat = Seat() if command else Seat(ready=_tell_trainers)
    return launch(config, command, seat=seat).exit_code


def _with_options(config: Config, options: argparse.Namespace) -> Config:
    """The configuration, changed by what the command line says."""
    if options.shard is not None:
        shard, num_shards = options.shard
        data = replace(config.data, shard=shard, num_shards=num_shards)
        config = replace(config, data=data)
    if options.replay is not None:
        config = replace(config, run=replace(config.run, replay=options.replay))
    return config


def is_fit(config: Config, command: Sequence[str]) -> bool:
    """Print what the checks before a start find; False when the run must not start."""
    findings = preflight(config, command)
    for finding in findings:
        print(f"fa-rollout-proc: {finding}", file=sys.stderr)
    return all(finding.severity is not Severity.ERROR for finding in findings)


def _tell_trainers(environment: Mapping[str, str]) -> None:
    print("# A trainer of this run needs these in its environment:")
    for name, value in environment.items():
        print(f"export {name}={value}")
    print("# Ctrl-C ends the run.", flush=True)


def _demo(options: argparse.Namespace) -> int:
    from fa_rollout.demo.main import demo

    return demo(options)


def _parser() -> argparse.ArgumentParser:
    codes = "\n".join(f"  {code:>4}  {meaning}" for code, meaning in EXIT_CODES.items())
    parser = argparse.ArgumentParser(
        prog="fa-rollout-proc",
        description="Fully asynchronous rollouts for RL post-training of language models.",
        epilog=f"exit codes:\n{codes}\n     n  the trainer's own code; 128 + s when signal s ended it",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fa-rollout-proc {__version__}")
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--log-level", default="warning", choices=levels, help="of this process")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    _add_run(verbs)
    _add_demo(verbs)
    return parser


def _add_run(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = verbs.add_parser(
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
        f"  fa-rollout-proc run run.toml\n\n{_EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("config", metavar="CONFIG", help="a TOML file")
    run.add_argument("--shard", type=_shard, metavar="I/N", help="prompts of node I of N (data.shard)")
    run.add_argument("--replay", metavar="LOG", help="give a recorded run's steps out again (run.replay)")


def _add_demo(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    demo = verbs.add_parser(
        "demo",
        help="see the whole system at work on this machine, without a GPU",
        description=(
            "Makes a small model with random weights, starts the embedded engine, the generator and\n"
            "a two-rank torchrun GRPO trainer, and shows how the reward rises. All\n"
            "it makes is in --output."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument(
        "--steps", type=_positive, metavar="N", help="optimizer steps (default: the task's own)"
    )
    demo.add_argument("--seed", type=int, default=0, metavar="S", help="of weights, prompts and sampling")
    demo.add_argument("--model", choices=("tiny", "smollm2"), default="tiny", help=_MODEL_HELP)
    demo.add_argument("--engine", default="embedded", metavar="WHICH", help=_ENGINE_HELP)
    demo.add_argument("--output", metavar="DIR", help="where everything goes (default: out/demo-TIME)")
    demo.add_argument("--staleness", type=int, metavar="N", help=_STALENESS_HELP)


def _shard(text: str) -> tuple[int, int]:
    shard, _, num_shards = text.partition("/")
    if not (shard.isdigit() and num_shards.isdigit() and int(shard) < int(num_shards)):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 0 to N - 1, found {text!r}")
    return int(shard), int(num_shards)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, found {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
