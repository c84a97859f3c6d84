"""`fa-rollout-proc demo`: the whole system at work on this machine."""

import argparse
from collections.abc import Sequence

from fa_rollout.verbs.configured import path, positive

_MODEL_HELP = """tiny: two layers from random weights, about a minute; smollm2: SmolLM2-135M-Instruct,
slow on a CPU"""
_ENGINE_HELP = """embedded, sglang (a real one on the CPU, see scripts/sglang_cpu), or sglang:URL of a running
engine that serves the model folder of --output"""
_STALENESS_HELP = "weight versions that a sample may be old when it is trained (default: the task's own)"


def add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Arguments of `demo`."""
    parser = verbs.add_parser(
        "demo",
        help="see the whole system at work on this machine, without a GPU",
        description=(
            "Makes a small model with random weights, starts the embedded engine, the generator and\n"
            "a two-rank torchrun GRPO trainer, and shows how the reward rises. All\n"
            "it makes is in --output."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--steps", type=positive, metavar="N", help="optimizer steps (default: the task's own)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of weights, prompts and sampling")
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny", help=_MODEL_HELP)
    parser.add_argument("--engine", default="embedded", metavar="WHICH", help=_ENGINE_HELP)
    parser.add_argument(
        "--output", type=path, metavar="DIR", help="where everything goes (default: out/demo-TIME)"
    )
    parser.add_argument("--staleness", type=int, metavar="N", help=_STALENESS_HELP)
    parser.set_defaults(call=call, takes_command=False, starts_a_run=True)


def call(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Run the demo, and return the exit code."""
    from fa_rollout.demo.main import demo

    return demo(options)
