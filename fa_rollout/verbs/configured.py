"""What all commands with a CONFIG share: the file, its flags and their help; and types of arguments."""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from fa_rollout.config import Config, ConfigError, load
from fa_rollout.config.keys import sections
from fa_rollout.config.paths import PathError, expanded
from fa_rollout.config.quantities import QuantityError, Seconds, plain

_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG and its options; flags of keys are removed from the command line before it is parsed."""
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="TOML file; optional if the keys are given as flags"
    )
    parser.add_argument(
        "--shard",
        type=_shard,
        metavar="I/N",
        help="use the prompts of node I of N (sets data.shard and data.num_shards)",
    )
    parser.add_argument(
        "--help-keys",
        action=_HelpKeys,
        nargs="?",
        metavar="WORD",
        help="list all configuration keys, or those that mention WORD; each is also a flag",
    )
    parser.set_defaults(takes_keys=True)


def positive(text: str) -> int:
    """An argument that is a count."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, found {text!r}")
    return int(text)


def change(options: argparse.Namespace, section: str, **values: Any) -> None:
    """Set keys from an option. Like flags, they are applied before the checks."""
    options.changes.setdefault(section, {}).update(values)


def configuration(options: argparse.Namespace) -> Config:
    """The file's configuration with the command line's changes.

    Raises:
        ConfigError: there is neither file nor flag, or a rule is broken.
    """
    if options.shard is not None:
        change(options, "data", shard=options.shard[0], num_shards=options.shard[1])
    if options.config is None and not options.changes:
        raise ConfigError(
            f"{options.verb} needs a CONFIG file, or its keys as flags such as --data.path; "
            "`fa-rollout-proc run --help` shows a minimal one"
        )
    return load(options.config, options.changes)


def add_keys(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each configuration key, for shell completion, which reads the parser."""
    for section in sections():
        group = parser.add_argument_group(section.name)
        for key in section.keys:
            choices = [part for part in get_args(key.hint) if isinstance(part, str)]
            group.add_argument(
                key.flag, choices=choices or None, help=key.doc.partition(". ")[0] or key.words
            )


class _HelpKeys(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print(help_keys("" if values is None else str(values)), end="")
        parser.exit()


def help_keys(word: str) -> str:
    """The keys whose name or description contains `word`; all keys if it is empty."""
    parts: list[str] = []
    for section in sections():
        found = [key for key in section.keys if word.lower() in f"{key.flag} {key.doc}".lower()]
        if found:
            parts.append(f"[{section.name}]  {section.doc}\n")
        for key in found:
            default = "required" if key.default is None else f"default {key.default}"
            parts.append(f"  {key.flag}  {key.words}; {default}\n")
            parts += [
                f"{line}\n"
                for line in textwrap.wrap(
                    key.doc, _WIDTH, initial_indent="      ", subsequent_indent="      "
                )
            ]
        parts += ["\n"] if found else []
    return "".join(parts) or f"no configuration key mentions {word!r}\n"


def seconds(text: str) -> float:
    """An argument that is a time."""
    try:
        return float(plain("a time", Seconds, text))
    except QuantityError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def path(text: str) -> Path:
    """An argument that is a path; a shell expands `--out ~/x`, but not `--out=~/x`."""
    try:
        return Path(expanded("a path", text))
    except PathError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _shard(text: str) -> tuple[int, int]:
    shard, _, num_shards = text.partition("/")
    if not (shard.isdigit() and num_shards.isdigit() and int(shard) < int(num_shards)):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 0 to N - 1, found {text!r}")
    return int(shard), int(num_shards)
