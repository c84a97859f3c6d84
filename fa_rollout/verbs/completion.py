"""`fa-rollout-proc completion`: a shell script that completes commands, options and keys."""

import argparse
from collections.abc import Sequence

_SHELLS = ("bash", "zsh", "fish")


def add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Arguments of `completion`."""
    parser = verbs.add_parser(
        "completion",
        help="print a shell completion script",
        description=(
            "Prints a script that completes commands, options and configuration keys. To install it:\n"
            "  fa-rollout-proc completion bash > ~/.local/share/bash-completion/completions/fa-rollout-proc\n"
            "  fa-rollout-proc completion zsh > ~/.zfunc/_fa-rollout-proc\n"
            "  fa-rollout-proc completion fish > ~/.config/fish/completions/fa-rollout-proc.fish\n"
            "For zsh, add the folder to $fpath before compinit is called."
        ),
    )
    parser.add_argument("shell", choices=_SHELLS)
    parser.set_defaults(call=call)


def call(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Print, and return the exit code."""
    import shtab

    from fa_rollout.cli import parser

    print(shtab.complete(parser(with_keys=True), options.shell))
    return 0
