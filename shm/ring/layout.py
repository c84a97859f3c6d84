"""Where each byte of a record lies: the only place that knows offsets.

A record begins at a multiple of 64 and is as long as its descriptor says, also a multiple of 64:

    0    magic         u32   "FaR1"
    4    header crc    u32   crc32 of bytes 8 .. end of head
    8    version       u16   of this layout
    10   num_columns   u16
    12   flags         u32   bit 0: the payload crc counts
    16   head_length   u32   bytes of the head
    20   payload crc   u32   crc32 of all that follows the head, 0 without the flag
    24   schema        u64   fingerprint, agreed by both sides
    32   run           u64
    40   incarnation   u64   life of the writer
    48   sequence      u64   of the commit
    56   position      u64   in the endless stream of bytes; the offset is the remainder by the ring's size
    64   length        u64   of the whole record
    72   columns       32 bytes each: dtype char[4], num_dims u16, zero u16, offset u64, dims u32[4]
    ..   head          bytes that mean nothing here
    ..   arrays        each at a multiple of 64

All numbers are little endian.
"""

import re
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

MAGIC = int.from_bytes(b"FaR1", "little")
VERSION = 1
ALIGNMENT = 64
FLAG_PAYLOAD_CRC = 1
MAX_DIMS = 4

GUARD = struct.Struct("<II")
"""Magic and header crc; the crc covers what follows it."""
COUNTS = struct.Struct("<IIHHIII")
IDENTITY = struct.Struct("<QQQQQQ")
BODY = struct.Struct("<HHIIIQQQQQQ")
HEADER = struct.Struct(GUARD.format + BODY.format[1:])
"""The whole of it: GUARD and BODY, or COUNTS and IDENTITY."""
COLUMN = struct.Struct("<4sHHQIIII")
COLUMN_BYTES = COLUMN.size

# --- dtypes --------------------------------------------------------------------------------------------

_PLAIN = re.compile(rb"[<|][biufcV][1-9][0-9]?")
_DTYPES: dict[Any, tuple[np.dtype[Any], bytes, int]] = {}
"""What a caller names -> (dtype, its four bytes, item size); filled as they are met."""
_CODES: dict[bytes, np.dtype[Any]] = {}
_TABLES: dict[int, struct.Struct] = {}


class Field(NamedTuple):
    """One array of a record: dtype (anything numpy takes) and shape, of at most four dimensions."""

    dtype: Any
    shape: tuple[int, ...]


class Plan(NamedTuple):
    """Where the parts of one record lie, relative to its start."""

    length: int
    prefix_bytes: int
    """Header, column table and head."""
    arrays: list[tuple[np.dtype[Any], tuple[int, ...], int]]
    """(dtype, shape, offset)"""
    table: list[Any]
    """Flat values of the column table."""


def table_struct(num_columns: int) -> struct.Struct:
    """The packed column table of a record with so many columns."""
    known = _TABLES.get(num_columns)
    if known is None:
        known = _TABLES[num_columns] = struct.Struct("<" + COLUMN.format[1:] * num_columns)
    return known


def plan(head_bytes: int, fields: Sequence[tuple[Any, tuple[int, ...]]]) -> Plan:
    """Lay a record out: `head_bytes` of head and one array per field.

    Raises:
        ValueError: a dtype that is no plain number, or a shape of more than four dimensions.
    """
    prefix = HEADER.size + COLUMN_BYTES * len(fields) + head_bytes
    offset = (prefix + 63) & -64
    arrays = []
    table: list[Any] = []
    for dtype, shape in fields:
        known = _DTYPES.get(dtype)
        if known is None:
            known = _learn(dtype)
        dims = len(shape)
        if dims == 1:
            size = shape[0]
            table += (known[1], 1, 0, offset, size, 1, 1, 1)
        else:
            size = 1
            for dim in shape:
                size *= dim
            if dims > MAX_DIMS:
                raise ValueError(
                    f"an array of a record has at most {MAX_DIMS} dimensions, found shape {shape}"
                )
            table += (known[1], dims, 0, offset, *shape, *(1,) * (MAX_DIMS - dims))
        arrays.append((known[0], shape, offset))
        offset = (offset + size * known[2] + 63) & -64
    return Plan(offset, prefix, arrays, table)


def _learn(dtype: Any) -> tuple[np.dtype[Any], bytes, int]:
    known = np.dtype(dtype).newbyteorder("<")
    code = known.str.encode()
    if not _PLAIN.fullmatch(code) or known.fields is not None or known.subdtype is not None:
        raise ValueError(f"an array of a record holds plain numbers, found dtype {dtype!r}")
    _CODES[code.ljust(4, b"\0")] = known
    entry = _DTYPES[dtype] = (known, code.ljust(4, b"\0"), known.itemsize)
    return entry


def dtype_of(code: bytes) -> np.dtype[Any] | None:
    """The dtype that a column's four bytes name; None when they name none that a record may hold."""
    known = _CODES.get(code)
    name = code.rstrip(b"\0")
    if known is not None or not _PLAIN.fullmatch(name):
        return known
    try:
        return _learn(name.decode("ascii"))[0]
    except (TypeError, ValueError):
        return None
