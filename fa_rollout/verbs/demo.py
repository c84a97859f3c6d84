"""`fa-rollout-proc demo`: a complete run on this machine."""

import argparse
from collections.abc import Sequence

from fa_rollout.verbs.configured import path, positive

_MODEL_HELP = """tiny: two layers with random weights, about a minute; smollm2: SmolLM2-135M-Instruct, slow
on a CPU (default: tiny)"""
_ENGINE_HELP = """embedded; sglang: a real SGLang on the CPU (see scripts/sglang_cpu); sglang:URL: a running
engine that serves the model in --output (default: embedded)"""
_STALENESS_HELP = "staleness limit in weight versions (default: set by --model)"


def add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Arguments of `demo`."""
    parser = verbs.add_parser(
        "demo",
        help="watch a complete run on this machine, without a GPU",
        description=(
            "Creates a small model with random weights, starts the embedded engine, the generator and a\n"
            "GRPO trainer with two torchrun ranks, and shows the reward as it rises. All files are written\n"
            "to --output."
        ),
    )
    parser.add_argument(
        "--steps", type=positive, metavar="N", help="training steps (default: set by --model)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of weights, prompts and sampling (default: 0)"
    )
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny", help=_MODEL_HELP)
    parser.add_argument("--engine", default="embedded", metavar="WHICH", help=_ENGINE_HELP)
    parser.add_argument("--output", type=path, metavar="DIR", help="output folder (default: out/demo-TIME)")
    parser.add_argument("--staleness", type=int, metavar="N", help=_STALENESS_HELP)
    parser.set_defaults(call=call, starts_a_run=True)


def call(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Run the demo, and return the exit code."""
    from fa_rollout.demo.main import demo

    return demo(options)
