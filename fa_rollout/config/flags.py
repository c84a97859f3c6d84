"""Each configuration key as a flag: `--rollout.staleness 2`.

In: words of a command line. Out: the words that are no such flags, and tables to lay over a configuration
file; they are checked there, by the same rules.

| a key that holds | is given as |
|---|---|
| text, a number, a size, a time | the bare value: `--reward.function task:reward`, `--ring.bytes 8GiB` |
| true or false | `--ring.poison` or `--ring.poison true`, `--data.shuffle false` |
| a list | one flag for each entry, or TOML: `--sampling.stop '["a", "b"]'` |
| a table | a flag for each entry, or TOML: `--evaluation.sampling.temperature 0` |
"""

import re
import tomllib
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from fa_rollout.config import ConfigError
from fa_rollout.config.keys import Key, by_path, nearest
from fa_rollout.config.quantities import is_quantity

Changes = dict[str, dict[str, Any]]
"""Section -> key -> value, as a file would give them."""

_FLAG = re.compile(r"--([a-z][\w-]*)\.([\w-]+)(?:\.([\w-]+))?(?:=(.*))?", re.DOTALL)
_BOOLS = {"true": True, "false": False}


def take(words: Sequence[str]) -> tuple[list[str], Changes]:
    """The words that are no flags of keys, in order, and what the flags say.

    Raises:
        ConfigError: a flag names no key, or has no value.
    """
    rest: list[str] = []
    changes: Changes = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        match = _FLAG.fullmatch(word)
        if match is None:
            rest.append(word)
            continue
        key = _key(f"{match[1]}.{match[2]}")
        text = match[4] if match[4] is not None else _next(key, queue)
        _put(changes.setdefault(key.section, {}), key, match[3], text)
    return rest, changes


def _key(path: str) -> Key:
    key = by_path().get(path)
    if key is not None:
        return key
    near = nearest(path)
    hint = f"did you mean --{near}?" if near else "run --help-keys lists them"
    raise ConfigError(f"unknown configuration key --{path}; {hint}")


def _next(key: Key, queue: list[str]) -> str:
    """The word after a flag; one of true or false may do without."""
    if _plain(key.hint) is bool and (not queue or queue[0].lower() not in _BOOLS):
        return "true"
    if not queue:
        raise ConfigError(f"{key.flag} must be followed by its value ({key.words})")
    return queue.pop(0)


def _put(values: dict[str, Any], key: Key, entry: str | None, text: str) -> None:
    kind = _plain(key.hint)
    origin = get_origin(kind)
    if origin is dict:
        table = values.setdefault(key.name, {})
        whole = _literal(text)
        if entry:
            table[entry] = plain_value(get_args(kind)[1], text)
        elif isinstance(whole, dict):
            table.update(whole)
        else:
            raise ConfigError(f"{key.flag} must be a TOML table or {key.flag}.NAME, found {text!r}")
    elif entry:
        raise ConfigError(f"{key.flag} holds no table, found {key.flag}.{entry}")
    elif origin is list:
        whole = _literal(text) if text.lstrip().startswith("[") else None
        items = whole if isinstance(whole, list) else [plain_value(get_args(kind)[0], text)]
        values[key.name] = [*values.get(key.name, []), *items]
    else:
        values[key.name] = plain_value(key.hint, text)


def plain_value(hint: Any, text: str) -> Any:
    """Text becomes a number or a truth value where the key holds one; what does not is refused later."""
    kind = _plain(hint)
    if kind is bool:
        return _BOOLS.get(text.lower(), text)
    if kind in (int, float):
        return text if is_quantity(hint) else _number(text)
    return text if kind is str or get_origin(kind) is Literal else _literal(text)


def _number(text: str) -> Any:
    value = _literal(text)
    if isinstance(value, int | float):
        return value
    try:
        return float(text)
    except ValueError:
        return text


def _literal(text: str) -> Any:
    """A TOML value, or else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _plain(hint: Any) -> Any:
    """The type without None and without limits."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return _plain(next(part for part in get_args(hint) if part is not NoneType))
    return hint
