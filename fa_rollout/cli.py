"""`fa-rollout-proc`: the command line.

In: arguments. Out: an exit code of `launcher.ending.EXIT_CODES`. Invariant: a mistake of the user's ends in
one message without a traceback and before anything has been started.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

from fa_rollout.launcher.ending import EXIT_CODES, EXIT_REFUSED
from fa_rollout.verbs import demo, run
from fa_rollout.version import __version__
from shm.errors import FaRolloutError

VERBS = (run, demo)
"""In the order of the help."""
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, and return the exit code."""
    own, command = _split(list(sys.argv[1:] if arguments is None else arguments))
    options = parser().parse_args(own)
    if command and not options.takes_command:
        _refuse(f"a trainer's command after -- does not go with {options.verb}, found {' '.join(command)!r}")
    logging.basicConfig(level=options.log_level.upper(), format=_LOG_FORMAT)
    try:
        return int(options.call(options, command))
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


def parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
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
    for verb in VERBS:
        verb.add(verbs)
    return parser


if __name__ == "__main__":
    sys.exit(main())
