"""Converts Arrow values to Python values.

Arrow pads every struct of a column to the union of all fields, with nulls. Invariant: null fields are left
out of their dict, at any depth, since a template would print them and user code would mistake them for data.
These nulls stay: elements of lists (including `enum`), values of maps, and `default` and `const` of a JSON
schema, where null is a value.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

Clean = Callable[[Any], Any]

_SCHEMA_WORDS = ("anyOf", "oneOf", "allOf", "enum", "$ref", "items", "properties")
_TEXT_WORDS = ("type", "description", "title", "format")
_NAMES = ("properties", "patternProperties", "$defs", "definitions")
"""Keys of a schema whose entries are arbitrary names: a property may be called `default`."""


def cleaner(kind: "pyarrow.DataType", *, are_names: bool = False) -> Clean | None:
    """A function that removes padding from values of this type; None if the type contains no struct."""
    import pyarrow as pa

    is_kind = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return cleaner(kind.storage_type)
    if is_kind.is_dictionary(kind) or is_kind.is_run_end_encoded(kind):
        return cleaner(kind.value_type)
    if is_kind.is_struct(kind):
        return _struct(
            {field.name: cleaner(field.type, are_names=field.name in _NAMES) for field in kind},
            are_names=are_names,
        )
    if is_kind.is_map(kind):
        return _map(cleaner(kind.item_type))
    if _is_list(kind):
        return _list(cleaner(kind.value_type))
    return None


def holds_times(kind: "pyarrow.DataType") -> bool:
    """Whether it holds dates or times, at any depth: Arrow allows years beyond Python's 1 to 9999."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return holds_times(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return holds_times(kind.value_type)
    fields = [kind.field(index).type for index in range(kind.num_fields)]
    return pa.types.is_temporal(kind) or any(map(holds_times, fields))


def _is_list(kind: "pyarrow.DataType") -> bool:
    import pyarrow as pa

    names = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")
    return any(getattr(pa.types, name)(kind) for name in names if hasattr(pa.types, name))


def _struct(fields: dict[str, Clean | None], *, are_names: bool) -> Clean:
    def clean(value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        keeps = () if are_names else _null_values(value)
        return {
            name: item if (below := fields.get(name)) is None else below(item)
            for name, item in value.items()
            if item is not None or name in keeps
        }

    return clean


def _null_values(value: dict[str, Any]) -> tuple[str, ...]:
    """The keys whose null is a value: in a schema, or in an object with only nulls."""
    has_words = any(value.get(word) is not None for word in _SCHEMA_WORDS)
    has_text = any(isinstance(value.get(word), str | list) for word in _TEXT_WORDS)
    if not (has_words or has_text or all(item is None for item in value.values())):
        return ()
    kind = value.get("type")
    may_be_null = kind is None or kind == "null" or (isinstance(kind, list) and "null" in kind)
    return ("default", "const") if may_be_null else ("default",)


def _map(below: Clean | None) -> Clean | None:
    if below is None:
        return None
    return lambda value: None if value is None else {name: below(item) for name, item in value.items()}


def _list(below: Clean | None) -> Clean | None:
    if below is None:
        return None
    return lambda value: None if value is None else [below(item) for item in value]
