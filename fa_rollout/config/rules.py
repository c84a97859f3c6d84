"""What a value of the configuration may be, in words, and the first value that is not.

In: the types of `sections`. Out: sentences for the reference page, `--help-keys` and errors. Invariant: no
wording of the library that does the decoding reaches a person.
"""

import difflib
import math
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

_PLAIN = {str: "a string", bool: "true or false", int: "a whole number", float: "a number", Any: "any value"}
_PLURAL = {"a string": "strings", "a whole number": "whole numbers", "a path": "paths", "a table": "tables"}
_SHOWN_CHARACTERS = 60
_INT_BITS = 63


def words(hint: Any) -> str:
    """What a value of this type may be."""
    return _or([word for part in alternatives(hint) for word in _of_one(part)])


def fault(hint: Any, value: Any, key: str) -> str | None:
    """What is wrong with a value, as one sentence that names the key, the rule and what was found; None where
    it is right.

    `key` is `section.name`, or empty for the whole configuration.
    """
    deeper = next(filter(None, _inside(hint, value, key)), None)
    if deeper is not None:
        return deeper
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return _sentence(hint, value, key)
    return None if _is_finite(value) else _sentence(hint, value, key)


def _is_finite(value: Any) -> bool:
    """Whether JSON and 64 bits hold it, which is how processes and engines pass it on."""
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or value.bit_length() <= _INT_BITS


def shown(value: Any) -> str:
    """A value as a message quotes it: as TOML would, and not at any length."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case dict():
            return "a table"
        case list():
            text = f"[{', '.join(map(shown, value))}]"
        case _:
            text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _inside(hint: Any, value: Any, key: str) -> Iterator[str | None]:
    """Faults of what a table or a list holds."""
    for part in alternatives(hint):
        kind = bare(part)
        if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from _in_table(kind, value, key)
        elif isinstance(value, dict) and get_origin(kind) is dict:
            yield from (fault(get_args(kind)[1], item, _below(key, name)) for name, item in value.items())
        elif isinstance(value, list) and get_origin(kind) is list:
            yield from (fault(get_args(kind)[0], item, f"{key}[{i}]") for i, item in enumerate(value))


def _in_table(kind: type[msgspec.Struct], table: dict[str, Any], key: str) -> Iterator[str | None]:
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for name, value in table.items():
        known = name in fields
        yield (
            fault(fields[name].type, value, _below(key, name)) if known else _unknown(name, list(fields), key)
        )
    for name, field in fields.items():
        if field.required and name not in table:
            yield f"{_below(key, name) if key else f'[{name}]'} must be given, found none{_example(key)}"


def _example(key: str) -> str:
    at_top = not key or ("." not in key and "[" not in key)
    return "; `fa-rollout-proc run --help` shows the smallest configuration" if at_top else ""


def _unknown(name: str, known: list[str], key: str) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    where = f"section [{key}]" if key else "the top level"
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {name!r} in {where}; {hint}"


def _sentence(hint: Any, value: Any, key: str) -> str:
    rule = _pattern_rule(hint) or words(hint)
    near = difflib.get_close_matches(str(value), _choices(hint), n=1)
    meant = f"; did you mean {near[0]!r}?" if near and near[0] != value else ""
    return f"{key or 'the configuration'} must be {rule}, found {shown(value)}{meant}"


def _pattern_rule(hint: Any) -> str | None:
    """Names have a form that a pattern says better than words."""
    for meta in _metas(hint):
        if meta.pattern is not None:
            return f"a name of letters, digits and _, at most {meta.max_length} characters"
    return None


def _of_one(hint: Any) -> list[str]:
    kind, metas = bare(hint), list(_metas(hint))
    if get_origin(kind) is Literal:
        return [f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in get_args(kind)]
    if get_origin(kind) is list:
        limit = next((f", at most {meta.max_length}" for meta in metas if meta.max_length is not None), "")
        return [f"a list of {_many(get_args(kind)[0])}{limit}"]
    if get_origin(kind) is dict:
        inner = get_args(kind)[1]
        return ["a table" if inner is Any else f"a table of {_many(inner)}"]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return ["a table"]
    extra = {name: value for meta in metas for name, value in (meta.extra or {}).items()}
    if "example" in extra:
        is_some = any(meta.gt is not None for meta in metas)
        return [f"a {extra['what']} such as {extra['example']}" + (", not 0" if is_some else "")]
    if "is_path" in extra:
        return ["a path"]
    return [_PLAIN.get(kind, "a value of another type") + _bounds(kind, metas)]


def _many(hint: Any) -> str:
    text = words(hint)
    return next((f"{many}{text[len(one) :]}" for one, many in _PLURAL.items() if text.startswith(one)), text)


def _bounds(kind: Any, metas: list[msgspec.Meta]) -> str:
    low = next((meta.ge for meta in metas if meta.ge is not None), None)
    above = next((meta.gt for meta in metas if meta.gt is not None), None)
    high = next((meta.le for meta in metas if meta.le is not None), None)
    if low is not None:
        return f" from {low:g} to {high:g}" if high is not None else f", {low:g} or more"
    if above is not None:
        return f" above {above:g}" + (f", at most {high:g}" if high is not None else "")
    return "" if high is None else f", at most {high:g}"


def _choices(hint: Any) -> list[str]:
    kinds = map(bare, alternatives(hint))
    return [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]


def alternatives(hint: Any) -> list[Any]:
    """The members of a union except None, which a file expresses by leaving the key out."""
    if get_origin(hint) in (Union, UnionType):
        return [part for part in get_args(hint) if part is not NoneType]
    return [hint]


def bare(hint: Any) -> Any:
    """The type without its limits."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _metas(hint: Any) -> Iterator[msgspec.Meta]:
    for part in alternatives(hint):
        if get_origin(part) is Annotated:
            yield from (meta for meta in get_args(part)[1:] if isinstance(meta, msgspec.Meta))


def _below(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _or(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"
