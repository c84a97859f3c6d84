"""Sizes and times as people write them: `"8GiB"`, `"30s"`. In: tables of a run. Out: plain numbers."""

import json
import re
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

_SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZES |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_TIMES = {"": 1, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600}

Bytes = Annotated[int, msgspec.Meta(ge=0, extra={"units": _SIZES, "what": "size", "example": "64MiB"})]
"""A size in bytes; in TOML a number or text such as `"64MiB"`."""
Seconds = Annotated[float, msgspec.Meta(ge=0.0, extra={"units": _TIMES, "what": "time", "example": "30s"})]
"""A time in seconds; in TOML a number or text such as `"30s"` or `"5m"`."""

SomeBytes = Annotated[int, msgspec.Meta(gt=0, extra={"units": _SIZES, "what": "size", "example": "64MiB"})]
"""A size that is not zero."""
SomeSeconds = Annotated[
    float, msgspec.Meta(gt=0.0, extra={"units": _TIMES, "what": "time", "example": "30s"})
]
"""A time that is not zero."""


class QuantityError(ValueError):
    """Text that is no size or time."""


def with_plain_quantities(section: type, table: dict[str, Any], name: str) -> dict[str, Any]:
    """A table of this section with numbers in place of the text of sizes and times.

    Raises:
        QuantityError: one cannot be read; the text names its key.
    """
    hints = get_type_hints(section, include_extras=True)
    return {
        key: plain(f"{name}.{key}", hints[key], value) if key in hints else value
        for key, value in table.items()
    }


def is_quantity(hint: Any) -> bool:
    """Whether a type is a size or a time, alone or inside a union."""
    return _quantity(hint) is not None


def plain(key: str, hint: Any, value: Any) -> Any:
    """The number that the text of a size or time means; any other value stays what it is.

    Raises:
        QuantityError: the text cannot be read.
    """
    quantity = _quantity(hint)
    if quantity is None or not isinstance(value, str) or value in _words(hint):
        return value
    units = quantity["units"]
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].lower() not in units:
        if _words(hint):
            return value  # refused with the words that are allowed
        raise QuantityError(
            f"{key} must be a {quantity['what']} such as {quantity['example']}, or a number, found {value!r}"
        )
    number = float(match[1]) * units[match[2].lower()]
    return int(number) if units is _SIZES else number


def written(hint: Any, value: Any) -> str:
    """A value as a file writes it: `"64MiB"`, `"30s"`, `true`, `[]`."""
    quantity = _quantity(hint)
    if quantity is None or isinstance(value, str):
        return json.dumps(value)
    units = (
        {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "": 1} if quantity["units"] is _SIZES else {"s": 1}
    )
    unit = next(unit for unit, size in units.items() if value % size == 0 or size == 1)
    return json.dumps(f"{value / units[unit]:g}{unit}")


def _words(hint: Any) -> tuple[Any, ...]:
    """Words that stand for themselves, such as `"off"`, in a union with a quantity."""
    return tuple(word for part in get_args(hint) if get_origin(part) is Literal for word in get_args(part))


def _quantity(hint: Any) -> dict[str, Any] | None:
    """Units of a type that was declared as `Bytes` or `Seconds`, also inside a union."""
    for part in get_args(hint):
        if isinstance(part, msgspec.Meta) and part.extra and "units" in part.extra:
            return part.extra
        if inner := _quantity(part):
            return inner
    return None
