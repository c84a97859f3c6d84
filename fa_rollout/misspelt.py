"""What msgspec says against a configuration, for people: what must hold, what was found, the nearest key."""

import difflib
import re
from typing import Any

_UNKNOWN = re.compile(r"unknown field `([^`]+)`(?: - at `\$\.?([^`]*)`)?")
_MISSING = re.compile(r"missing required field `([^`]+)`(?: - at `\$\.?([^`]*)`)?")
_WRONG_TYPE = re.compile(r"Expected `([^`]+)`, got `([^`]+)`(?: - at `\$\.?([^`]*)`)?")
_WORDS = {
    "object": "a table",
    "array": "a list",
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "nothing",
}
SMALLEST = "`fa-rollout-proc run --help` shows the smallest configuration"


def explained(text: str, sections: dict[str, Any]) -> str:
    """The text of a validation error; `sections` are the known tables by name, the top level under `""`."""
    if found := _MISSING.search(text):
        name, section = found[1], found[2] or ""
        key = f"{section}.{name}" if section else f"[{name}]"
        return f"{key} must be given, found none; {SMALLEST}"
    if found := _WRONG_TYPE.search(text):
        wanted, got = (
            " or ".join(_WORDS.get(word, word) for word in words.split(" | ")) for words in found.group(1, 2)
        )
        return f"{found[3] or 'the configuration'} must be {wanted}, found {got}"
    unknown = _UNKNOWN.search(text)
    section = (unknown[2] or "") if unknown else ""
    if unknown is None or section not in sections:
        return text.replace("$.", "")
    name, known = unknown[1], sections[section].__struct_fields__
    near = difflib.get_close_matches(name, known, n=1)
    where = f"section [{section}]" if section else "the top level"
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {name!r} in {where}; {hint}"
