"""`fa-rollout-proc config`: the effective configuration, with flags and defaults applied."""

import argparse
from collections.abc import Sequence

from fa_rollout.config import to_shown_dict, to_toml
from fa_rollout.verbs.configured import add_arguments, configuration


def add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Arguments of `config`."""
    parser = verbs.add_parser(
        "config",
        help="check a configuration and print it with flags and defaults applied",
        usage="fa-rollout-proc config [CONFIG] [--SECTION.KEY VALUE ...]",
        description=(
            "Prints the configuration that `run` would use, as TOML that it accepts; secrets are shown as\n"
            "***. Starts nothing and reads only the file. To check the machine as well, use\n"
            "`fa-rollout-proc doctor`."
        ),
    )
    add_arguments(parser)
    parser.set_defaults(call=call)


def call(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Print, and return the exit code."""
    print(to_toml(to_shown_dict(configuration(options))), end="")
    return 0
