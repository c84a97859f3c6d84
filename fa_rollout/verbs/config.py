"""`fa-rollout-proc config`: the configuration that counts, after the flags and with all defaults."""

import argparse
from collections.abc import Sequence

from fa_rollout.config import to_shown_dict
from fa_rollout.config.toml import written
from fa_rollout.verbs.configured import add_arguments, configuration


def add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Arguments of `config`."""
    parser = verbs.add_parser(
        "config",
        help="check a configuration and print it whole, with flags and defaults",
        usage="fa-rollout-proc config [CONFIG] [--SECTION.KEY VALUE ...]",
        description=(
            "Prints what `run` would work with, as TOML that it takes back; secrets are shown as ***.\n"
            "Nothing is started, and nothing but the file is looked at; `fa-rollout-proc doctor` looks at\n"
            "the machine."
        ),
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(call=call, takes_command=False)


def call(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Print, and return the exit code."""
    print(written(to_shown_dict(configuration(options))), end="")
    return 0
