"""Rows of a Parquet file: the table stays in Arrow memory, and rows are converted to Python values on demand.

The conversion is Arrow's, not pandas' or numpy's: lists become lists, structs dicts (without padding nulls)
and bools bools, at any depth, since chat templates test them for truth.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_rollout import config
from fa_rollout.config import ConfigError
from fa_rollout.data.arrow import cleaner, holds_times
from fa_rollout.data.row import BadRow, listed, row_from

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

_NOT_FOR_PYTHON = (ValueError, OverflowError, KeyError)
"""Arrow's exceptions for text that is not UTF-8, years beyond 9999, and unknown time zones."""


class ParquetFile:
    """A file with all prompts checked; `num_rows` good rows can be read by index."""

    def __init__(self, path: Path, data: config.Data, on_bad: Callable[[str, str], None]) -> None:
        """Read the needed columns; `on_bad(place, reason)` is called for each bad row and may raise."""
        self.path = path
        self._table = _read(path, data)
        self.keys = set(self._table.column_names)
        """The columns that are used."""
        self._cleaners = {field.name: cleaner(field.type) for field in self._table.schema}
        self._asked = self.keys & {*data.column_keys, *(data.metadata_keys or ())}
        self._left_out: set[str] = set()
        """Columns not named in the configuration whose value in some row Python cannot hold."""
        is_valid = _is_valid(self._table)
        bad, checked = {}, self._asked & {data.prompt_key, data.tools_key, data.chat_template_kwargs_key}
        for index in self._suspects(data) if is_valid else range(self._table.num_rows):
            try:
                row_from(self._decode(index, checked if is_valid else self._asked), data)
            except BadRow as error:
                bad[index] = str(error)
        for name in self._asked - checked:
            if holds_times(self._table.schema.field(name).type):
                bad |= self._unholdable(name)
        for index, reason in sorted(bad.items()):
            on_bad(f"{path}: row {index}", reason)
        self._good = np.delete(np.arange(self._table.num_rows), list(bad)) if bad else None

    def _suspects(self, data: config.Data) -> Iterable[int]:
        """Rows that may be bad, found if possible without converting the others to Python values."""
        import pyarrow as pa
        import pyarrow.compute as pc

        column, everything = self._table.column(data.prompt_key), range(self._table.num_rows)
        if {data.tools_key, data.chat_template_kwargs_key} & self.keys or holds_times(column.type):
            return everything
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            size = pc.binary_length(column)
        elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            size = pc.list_value_length(column)
            if not pa.types.is_struct(column.type.value_type) or pc.list_flatten(column).null_count:
                return everything
        else:
            return everything
        doubtful = pc.or_kleene(pc.is_null(column), pc.equal(size, 0))
        return [int(index) for index in np.flatnonzero(doubtful.to_numpy())]

    def _unholdable(self, name: str) -> dict[int, str]:
        """By row: why Python cannot hold the column's value."""
        column, bad = self._table.column(name), {}
        try:
            column.to_pylist(maps_as_pydicts="lossy")
        except _NOT_FOR_PYTHON:
            for index in range(len(column)):
                try:
                    self._value(name, index)
                except BadRow as error:
                    bad[index] = str(error)
        return bad

    def _decode(self, index: int, names: Iterable[str]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name in names:
            try:
                values[name] = self._value(name, index)
            except BadRow as error:
                if name in self._asked:
                    raise
                self._leave_out(name, index, error)
        return values

    def _value(self, name: str, index: int) -> Any:
        """One value. Raises BadRow if Python cannot hold it."""
        try:
            value = self._table.column(name)[index].as_py(maps_as_pydicts="lossy")
        except UnicodeDecodeError as error:
            raise BadRow(f"column {name!r}: text must be UTF-8: {error}") from None
        except _NOT_FOR_PYTHON as error:
            kind = self._table.schema.field(name).type
            raise BadRow(f"column {name!r} ({kind}) must hold values that Python can hold: {error}") from None
        clean = self._cleaners[name]
        return value if clean is None else clean(value)

    def _leave_out(self, name: str, index: int, error: BadRow) -> None:
        if name not in self._left_out:
            self._left_out.add(name)
            logger.warning("value left out of metadata file=%s row=%d reason=%s", self.path, index, error)

    @property
    def num_rows(self) -> int:
        return self._table.num_rows if self._good is None else len(self._good)

    def values(self, index: int) -> dict[str, Any]:
        """The columns of a row."""
        row = index if self._good is None else int(self._good[index])
        return self._decode(row, self._table.column_names)

    def close(self) -> None:
        """Does nothing: the table is in memory, no file is open."""


def _read(path: Path, data: config.Data) -> "pyarrow.Table":
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(
            f"reading {path} needs pyarrow, which cannot be imported ({error}): "
            "pip install 'fa-rollout[parquet]'"
        ) from error
    try:
        # Not read_table, which turns folder names such as `split=train` into columns.
        with pq.ParquetFile(path, memory_map=True) as file:
            names = file.schema_arrow.names
            if data.prompt_key not in names:
                raise ConfigError(
                    f"{path} has no prompts: data.prompt_key = {data.prompt_key!r} is not among its columns "
                    f"{listed(names)}"
                )
            metadata_keys = names if data.metadata_keys is None else data.metadata_keys
            wanted = {*data.column_keys, *metadata_keys}
            return _in_microseconds(file.read(columns=[name for name in names if name in wanted]))
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} must be a Parquet file: {error}") from error


def _is_valid(table: "pyarrow.Table") -> bool:
    """Whether all text in it is UTF-8; Arrow does not check this when it reads."""
    import pyarrow as pa

    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _in_microseconds(table: "pyarrow.Table") -> "pyarrow.Table":
    """Convert nanoseconds to microseconds: Python's datetime has no nanoseconds, but pandas writes them."""
    for index, field in enumerate(table.schema):
        coarser = _coarser(field.type)
        if coarser != field.type:
            table = table.set_column(index, field.name, table.column(index).cast(coarser, safe=False))
    return table


def _coarser(kind: "pyarrow.DataType") -> "pyarrow.DataType":
    """The type with nanoseconds replaced by microseconds, at any depth."""
    import pyarrow as pa

    is_kind = pa.types
    if is_kind.is_struct(kind):
        return pa.struct([field.with_type(_coarser(field.type)) for field in kind])
    if is_kind.is_map(kind):
        return pa.map_(_coarser(kind.key_type), _coarser(kind.item_type))
    if is_kind.is_fixed_size_list(kind):
        return pa.list_(_coarser(kind.value_type), kind.list_size)
    if is_kind.is_list(kind):
        return pa.list_(kind.value_field.with_type(_coarser(kind.value_type)))
    if is_kind.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_coarser(kind.value_type)))
    if getattr(kind, "unit", None) != "ns":
        return kind
    if is_kind.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.duration("us") if is_kind.is_duration(kind) else pa.time64("us")
