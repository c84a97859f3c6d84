"""`fa-rollout-proc completion`: a script that lets a shell complete commands, options and keys."""

import argparse
from collections.abc import Sequence

_SHELLS = ("bash", "zsh", "fish")


def add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Arguments of `completion`."""
    parser = verbs.add_parser(
        "completion",
        help="print a script that makes a shell complete this command",
        description=(
            "bash:  fa-rollout-proc completion bash >\n"
            "           ~/.local/share/bash-completion/completions/fa-rollout-proc\n"
            "zsh:   fa-rollout-proc completion zsh > DIR/_fa-rollout-proc\n"
            "           where $fpath has DIR before compinit is called\n"
            "fish:  fa-rollout-proc completion fish >\n"
            "           ~/.config/fish/completions/fa-rollout-proc.fish"
        ),
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("shell", choices=_SHELLS)
    parser.set_defaults(call=call, takes_command=False)


def call(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Print, and return the exit code."""
    import shtab

    from fa_rollout.cli import parser

    print(shtab.complete(parser(with_keys=True), options.shell))
    return 0
