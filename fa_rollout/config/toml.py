"""Tables written as TOML. In: nested dicts of plain values. Out: text that `tomllib` reads as the same dicts.

A key that is None has no form in TOML: it is left as a comment.
"""

import json
import re
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def written(tree: dict[str, Any]) -> str:
    """One table a section; what is nested deeper is written inline."""
    lines: list[str] = []
    for section, table in tree.items():
        lines.append(f"[{_key(section)}]")
        for name, value in table.items():
            lines.append(f"# {name} is not set" if value is None else f"{_key(name)} = {_value(value)}")
        lines.append("")
    return "\n".join(lines)


def _value(value: Any) -> str:
    match value:
        case bool() | str():
            # JSON's escapes are a part of TOML's, but for the one character that JSON leaves alone.
            return json.dumps(value).replace("\x7f", "\\u007F")
        case dict():
            items = (f"{_key(name)} = {_value(part)}" for name, part in value.items() if part is not None)
            return "{" + ", ".join(items) + "}"
        case list() | tuple():
            return "[" + ", ".join(_value(part) for part in value) + "]"
        case _:
            return repr(value)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name)
