"""Paths as people write them: `~/runs`, `$SCRATCH/out`. In: tables of a run. Out: paths that every process
reads alike.

Invariant: a path that is expanded stays what it is when it is expanded again.
"""

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_type_hints

import msgspec

FilePath = Annotated[str, msgspec.Meta(extra={"is_path": True})]
"""A path of a configuration; `~` and `$NAME` or `${NAME}` at any place are filled in."""

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


class PathError(ValueError):
    """A path that names what is not known here."""


def with_whole_paths(section: type, table: dict[str, Any], name: str) -> dict[str, Any]:
    """A table of this section with every path expanded.

    Raises:
        PathError: one cannot be; the text names its key.
    """
    hints = get_type_hints(section, include_extras=True)
    return {
        key: _in_value(f"{name}.{key}", value) if _is_path(hints.get(key)) else value
        for key, value in table.items()
    }


def expanded(key: str, text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The path with home folders and variables filled in; `key`: what the user calls it.

    Raises:
        PathError: a variable is not set, or a user has no home folder here.
    """

    def value(match: re.Match[str]) -> str:
        variable = match[1] or match[2]
        if variable not in environment:
            raise PathError(
                f"{key} = {text!r}: the variable {variable} is not set; set it, or write the path in full"
            )
        return environment[variable]

    filled = _VARIABLE.sub(value, text)
    if not filled.startswith("~"):
        return filled
    home = os.path.expanduser(filled)
    if home.startswith("~"):
        user = filled[1:].partition("/")[0]
        raise PathError(
            f"{key} = {text!r}: no home folder is known for {user or 'this user'!r}; write the path in full"
        )
    return home


def _in_value(key: str, value: Any) -> Any:
    if isinstance(value, str):
        return expanded(key, value)
    if isinstance(value, dict):
        return {name: _in_value(f"{key}.{name}", part) for name, part in value.items()}
    return value


def _is_path(hint: Any) -> bool:
    """Whether a type was declared as `FilePath`, also inside a union or as the values of a table."""
    for part in get_args(hint):
        if isinstance(part, msgspec.Meta) and part.extra and "is_path" in part.extra:
            return True
        if _is_path(part):
            return True
    return False
