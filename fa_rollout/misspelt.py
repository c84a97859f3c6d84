"""What msgspec says against a configuration, for people: with an unknown key comes the nearest known one."""

import difflib
import re
from typing import Any

_UNKNOWN = re.compile(r"unknown field `([^`]+)`(?: - at `\$\.?([^`]*)`)?")


def explained(text: str, sections: dict[str, Any]) -> str:
    """The text of a validation error; `sections` are the known tables by name, the top level under `""`."""
    unknown = _UNKNOWN.search(text)
    section = (unknown[2] or "") if unknown else ""
    if unknown is None or section not in sections:
        return text.replace("$.", "")
    name, known = unknown[1], sections[section].__struct_fields__
    near = difflib.get_close_matches(name, known, n=1)
    where = f"section [{section}]" if section else "the top level"
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {name!r} in {where}; {hint}"
