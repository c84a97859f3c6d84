"""Runs a server's module with the run's key as its `--api-key`: `python with_key.py MODULE ARGUMENTS...`.

In: FA_ROLLOUT_ENGINE_KEY. Out: what `python -m MODULE ARGUMENTS... --api-key KEY` does. Invariant: the key is
never a word of a command line, which every user of the machine can read, and no child inherits it. Run by
path, in the server's own environment: nothing but the standard library is imported.
"""

import os
import runpy
import sys
from itertools import pairwise

KEY_VARIABLE = "FA_ROLLOUT_ENGINE_KEY"
OPTION = "--api-key"
_MANY_TOKENIZERS = "--tokenizer-worker-num"
"""More than one goes with no key in SGLang."""


def with_key(words: list[str], key: str | None) -> list[str]:
    """The arguments, with the key behind them unless they have one or the server could not take it."""
    has_key = any(word == OPTION or word.startswith(f"{OPTION}=") for word in words)
    return words if has_key or not key or takes_no_key(words) else [*words, OPTION, key]


def takes_no_key(words: list[str]) -> bool:
    """Whether SGLang would refuse to start with a key."""
    values = [after for word, after in pairwise(words) if word == _MANY_TOKENIZERS]
    values += [word.partition("=")[2] for word in words if word.startswith(f"{_MANY_TOKENIZERS}=")]
    return any(value != "1" for value in values)


def main() -> None:
    """Become the server."""
    module = sys.argv[1]
    sys.argv = [module, *with_key(sys.argv[2:], os.environ.pop(KEY_VARIABLE, None))]
    sys.path[0] = os.getcwd()  # as with `python -m`: this file's own folder has names of its own
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
