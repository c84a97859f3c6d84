"""The API key of the engines that a run starts: without it, every user of the machine could control them.

In: the configuration and the environment. Out: a key, passed to children by environment only, since all users
can read a command line. Invariant: engines that the run starts have a key of this run, or the user's own.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from itertools import pairwise

from fa_rollout.config import Config
from fa_rollout.engines.with_key import KEY_VARIABLE, OPTION


def engine_key(config: Config, environment: Mapping[str, str] = os.environ) -> str:
    """The key that launched engines and the router require, and that the generator sends."""
    chosen = environment.get(KEY_VARIABLE) or _named(
        [*(config.launch.command or []), *config.launch.arguments]
    )
    return chosen or secrets.token_hex(32)


def _named(words: Sequence[str]) -> str | None:
    """The key in a command line; the last one wins, as in the server."""
    named = [after for word, after in pairwise(words) if word == OPTION]
    named += [word.partition("=")[2] for word in words if word.startswith(f"{OPTION}=")]
    return named[-1] if named else None
