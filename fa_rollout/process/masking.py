"""Masks secrets in text that is written or shown: a configuration, a command line, an address.

In: text, words, or the nested tables of a configuration. Out: the same with `***` in place of what may be a
secret: values of variables, of options and keys whose names say so, users and queries of URLs. Invariant: it
only hides; what stays is as it was, and the mask tells nothing of what it hides.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

MASK = "***"

_SECRET_PARTS = {
    *("key", "keys", "apikey", "token", "secret", "secrets", "password", "passwd", "passphrase", "pwd"),
    *("credential", "credentials", "auth", "authorization", "bearer", "cookie"),
}
_NAME = r"[A-Za-z0-9_.\-]+"
_URL_USER = re.compile(r"(?<=://)[^/\s?#@\"']+(?=@)")
_URL_QUERY = re.compile(r"(\w://[^\s?#\"']*\?)([^\s#\"']+)")
_QUERY_VALUE = re.compile(r"=[^&;]+")
_BEARER = re.compile(r"\b(bearer|basic)(\s+)[^\s\"']+", re.IGNORECASE)
_NAMED = re.compile(rf"(?P<name>{_NAME})(?P<is>\"?\s*[:=]\s*\"?)(?P<value>[^\s\"',}}]+)")


def masked_text(text: str) -> str:
    """A line for people, or a value: URLs lose user and query, named secrets their value."""
    text = _URL_USER.sub(MASK, text)
    text = _URL_QUERY.sub(lambda found: found[1] + _query(found[2]), text)
    return _BEARER.sub(rf"\1\2{MASK}", text)


def masked_words(words: Sequence[str]) -> list[str]:
    """A command line: also the values of options, variables and JSON keys whose names tell of a secret."""
    return list(_masked_words(words))


def masked(tree: dict[str, Any]) -> dict[str, Any]:
    """A configuration as nested tables; all variables of `launch.environment` lose their values."""
    shown: dict[str, Any] = _tree(tree)
    environment = (shown.get("launch") or {}).get("environment")
    if environment:
        shown["launch"] = {**shown["launch"], "environment": dict.fromkeys(environment, MASK)}
    return shown


def _tree(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tree(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        is_words = all(isinstance(part, str) for part in value)
        return masked_words(value) if is_words else [_tree(part) for part in value]
    return masked_text(value) if isinstance(value, str) else value


def _masked_words(words: Sequence[str]) -> Iterator[str]:
    hides = False
    for word in words:
        if word.startswith("-"):
            hides = "=" not in word and _is_secret(word)
            yield _named_masked(word)
        else:
            yield MASK if hides else _named_masked(word)


def _named_masked(word: str) -> str:
    def mask(found: re.Match[str]) -> str:
        return found["name"] + found["is"] + MASK if _is_secret(found["name"]) else found[0]

    return _NAMED.sub(mask, masked_text(word))


def _is_secret(name: str) -> bool:
    """`--hf-token`, `WANDB_API_KEY`, `apiKey` have a part that names a secret; `--max-tokens` has none."""
    parts = re.split(r"[-_.]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower())
    return not _SECRET_PARTS.isdisjoint(parts)


def _query(query: str) -> str:
    return _QUERY_VALUE.sub(f"={MASK}", query) if "=" in query else MASK
