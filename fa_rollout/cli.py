"""`fa-rollout-proc`: the command line.

In: arguments. Out: an exit code of `launcher.ending.EXIT_CODES`. Invariant: a user's mistake is
reported in one message, without a traceback, before anything is started.
"""

import argparse
import difflib
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from fa_rollout.config.keys import nearest, take_flags
from fa_rollout.launcher.ending import EXIT_CODES, EXIT_REFUSED
from fa_rollout.process import log_level, streams
from fa_rollout.process.masking import masked_text
from fa_rollout.verbs import (
    completion,
    config,
    demo,
    doctor,
    engines,
    report,
    run,
    samples,
    simulate,
    top,
)
from fa_rollout.verbs.configured import add_keys
from fa_rollout.version import __version__
from shm.errors import FaRolloutError
from trainer_hook.printable import printable

VERBS = (
    *(run.add, demo.add, doctor.add, samples.add, report.add, top.add, engines.add, config.add, simulate.add),
    *(run.add_replay, completion.add),
)
"""In the order of the help."""
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, and return the exit code."""
    if arguments is None:
        streams.open_standard()
    own, command = _split(list(sys.argv[1:] if arguments is None else arguments))
    try:
        own, changes = take_flags(own)
        options = _options(own)
        if changes and not options.takes_keys:
            _refuse(f"{options.verb} takes no configuration keys, found [{', '.join(changes)}]")
        if command and not options.takes_command:
            _refuse(f"{options.verb} takes no trainer command after --, found {shlex.join(command)!r}")
        options.changes = changes
        if arguments is None and options.starts_a_run:
            streams.secure()
        log_level.log_to_stderr(options.log_level, _LOG_FORMAT)
        log_level.pass_on(options.log_level)
        return int(options.call(options, command))
    except KeyboardInterrupt:
        print("fa-rollout-proc: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader is gone: flush nothing at exit
        return 128 + signal.SIGPIPE
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except FaRolloutError as error:
        _refuse(str(error))


def _options(words: list[str]) -> argparse.Namespace:
    top = parser()
    options, unknown = top.parse_known_args(words)
    if unknown and options.takes_command and not unknown[0].startswith("-"):
        written = f"fa-rollout-proc {options.verb} ... -- {shlex.join(unknown)}"
        _refuse(f"put -- before the trainer's command: {written}")
    if unknown:
        _refuse(f"{options.verb}: unknown argument {unknown[0]}{_hint(unknown[0], options)}")
    return options


def _hint(word: str, options: argparse.Namespace) -> str:
    """The option that was probably meant: one of the command's own, or a key without its section."""
    if not word.startswith("--"):
        return ""
    name = word[2:].partition("=")[0]
    near = difflib.get_close_matches(f"--{name}", options.names, n=1, cutoff=0.75)
    if not near and options.takes_keys:
        key = nearest(name.replace("-", "_"))
        near = [] if key is None else [f"--{key}"]
    return f"; did you mean {near[0]}?" if near else f"; see fa-rollout-proc {options.verb} --help"


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The arguments, and the trainer's command after the first `--`."""
    if "--" not in words:
        return words, []
    cut = words.index("--")
    return words[:cut], words[cut + 1 :]


def _refuse(text: str) -> NoReturn:
    print(f"fa-rollout-proc: {printable(masked_text(text), lines=True)}", file=sys.stderr)
    raise SystemExit(EXIT_REFUSED)


def parser(*, with_keys: bool = False) -> argparse.ArgumentParser:
    """All commands and their arguments; `with_keys`: also the flags of configuration keys, for completion."""
    codes = "\n".join(f"  {code:>4}  {meaning}" for code, meaning in EXIT_CODES.items())
    parser = argparse.ArgumentParser(
        prog="fa-rollout-proc",
        description="Fully asynchronous rollouts for RL post-training of language models.",
        epilog=f"exit codes:\n{codes}\n     n  the trainer's own exit code, 128 + s if signal s ended it",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fa-rollout-proc {__version__}")
    help = "log level of all processes of a run except the trainer (default: %(default)s)"
    default = log_level.chosen()
    parser.add_argument("--log-level", default=default, choices=log_level.LEVELS, help=help)
    parser.set_defaults(takes_keys=False, takes_command=False, starts_a_run=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    for add in VERBS:
        add(verbs)
    for command in verbs.choices.values():
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.set_defaults(names=sorted(set(re.findall(r"--[a-z][a-z-]+", command.format_help()))))
        if with_keys and command.get_default("takes_keys"):
            add_keys(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
