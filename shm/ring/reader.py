"""The reader's end of a ring: descriptors in, read-only arrays out, and word of when the last view is gone.

Invariant: a record is verified before any of it is shown, else refused and counted; its bytes stay mapped for
as long as a view of them lives; its release is told once, and only when no view can read it any more.
"""

import struct
import sys
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shm.errors import DescriptorRefused, LeaseError
from shm.fork import disarm_in_children
from shm.ring.layout import (
    ALIGNMENT,
    BODY,
    COLUMN,
    COLUMN_BYTES,
    COUNTS,
    FLAG_PAYLOAD_CRC,
    GUARD,
    HEADER,
    IDENTITY,
    MAGIC,
    MAX_DIMS,
    VERSION,
    dtype_of,
)
from shm.ring.segment import ByteArray, Segment
from shm.ring.words import Descriptor
from shm.statistics import ReaderStatistics

AnyArray = npt.NDArray[Any]
_IDENTITY = slice(COUNTS.size - GUARD.size, HEADER.size - GUARD.size)
"""Where a header's body has it."""
Release = Callable[[int], object]
"""Called with the record's sequence; possibly in any thread, so it should only append to a deque or a set."""


class _Anchor(weakref.ref[ByteArray]):
    """Watches the one array that every view of a record hangs on."""

    __slots__ = ("release", "sequence")
    release: Release
    sequence: int


_ANCHORS: dict[int, _Anchor] = {}
"""Keeps anchors alive until their array dies, even if record and reader go first."""


class _Disarm:
    def disarm(self) -> None:
        _ANCHORS.clear()  # a view dropped in a forked child is not the end of its parent's lease


_DISARM = _Disarm()
disarm_in_children(_DISARM)


def _view_died(anchor: _Anchor) -> None:
    # SYNC POINT record-released: no load of the record can follow (pairs with release-received).
    if _ANCHORS.pop(id(anchor), None) is not None:
        anchor.release(anchor.sequence)


class Record:
    """One record as this process sees it: head and arrays, verified.

    Arrays are read-only views of the ring, whatever is sliced from them keeps the record, and dropping the
    last of them after `close` is what releases it.

    ```python
    record = reader.open(descriptor)
    record.on_release(released.append)
    total = record.arrays[0].sum()
    record.close()          # released here, unless somebody still holds an array or a tensor made of it
    ```
    """

    __slots__ = ("_arrays", "_base", "_is_copy", "head", "length", "sequence")

    def __init__(
        self, base: ByteArray, arrays: tuple[AnyArray, ...], sequence: int, head: bytes, *, is_copy: bool
    ) -> None:
        self._base: ByteArray | None = base
        self._arrays: tuple[AnyArray, ...] | None = arrays
        self._is_copy = is_copy
        self.head = head
        self.sequence = sequence
        self.length = base.size

    @property
    def arrays(self) -> tuple[AnyArray, ...]:
        """The record's arrays in the schema's order.

        Raises:
            LeaseError: the record was closed.
        """
        if self._arrays is None:
            raise LeaseError(f"a closed record shows nothing; record {self.sequence} was closed")
        return self._arrays

    def clone(self) -> "Record":
        """A second handle of the same bytes; the release comes when the last handle and view are gone."""
        if self._base is None:
            raise LeaseError(f"a closed record cannot be cloned; record {self.sequence} was closed")
        views = tuple([array.view() for array in self.arrays])
        return Record(self._base, views, self.sequence, self.head, is_copy=self._is_copy)

    def on_release(self, release: Release) -> None:
        """Have `release(sequence)` called once, when no handle and no view of the record is left."""
        if self._is_copy:
            release(self.sequence)
            return
        if self._base is None:
            raise LeaseError(f"a record is watched before it is closed; record {self.sequence} was closed")
        anchor = _Anchor(self._base, _view_died)
        anchor.release = release
        anchor.sequence = self.sequence
        _ANCHORS[id(anchor)] = anchor

    def is_held(self) -> bool:
        """Whether anything besides this handle can still read the record (exact on builds with the GIL)."""
        if self._base is None:
            return False
        return _references(self) != _idle_references(len(self.arrays))

    def close(self) -> None:
        """Give up this handle; idempotent, and safe under live views."""
        self._arrays = None
        self._base = None

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _references(record: Record) -> list[int]:
    counts = [sys.getrefcount(record._base), sys.getrefcount(record._arrays)]
    counts += [sys.getrefcount(array) for array in record.arrays]
    return counts


_IDLE: dict[int, list[int]] = {}


def _idle_references(num_arrays: int) -> list[int]:
    """Reference counts of a record that nobody else holds, measured: they differ between Python versions."""
    counts = _IDLE.get(num_arrays)
    if counts is None:
        counts = _IDLE[num_arrays] = _references(_unshared(num_arrays))
    return counts


def _unshared(num_arrays: int) -> Record:
    base = np.frombuffer(bytearray(1), np.uint8)
    arrays = tuple([np.ndarray((1,), np.uint8, base) for _ in range(num_arrays)])
    return Record(base, arrays, 0, b"", is_copy=False)


class RingReader:
    """Opens the records of one run and schema."""

    def __init__(self, segment: Segment, *, run: int, schema: int) -> None:
        self._map = segment.array.data.toreadonly()
        self._size = segment.size_bytes & -ALIGNMENT
        self._run = run
        self._schema = schema
        self._num_opened = self._num_refused = self._opened_bytes = 0

    def open(self, descriptor: Descriptor, *, copy: bool = False) -> Record:
        """Verify a record and show its arrays; with `copy` they are private and writable.

        Raises:
            DescriptorRefused: descriptor and bytes are not of one another, or of this run and schema.
        """
        _, sequence, position, length = descriptor
        offset = position % self._size
        if length < HEADER.size or position < 0 or (position | length) & 63 or offset + length > self._size:
            raise self._refusal(descriptor, f"no record of the ring of {self._size:,} bytes lies there")
        # SYNC POINT record-opened: the first load after the descriptor's receipt (pairs with record-written).
        base = np.frombuffer(self._map, np.uint8, length, offset)
        if copy:
            base = _aligned_copy(base)
        view = base.data
        magic, crc, version, num_columns, flags, head_bytes, payload_crc = COUNTS.unpack_from(view)
        head_start = BODY.size + num_columns * COLUMN_BYTES
        prefix = GUARD.size + head_start + head_bytes
        if magic != MAGIC or version != VERSION or prefix > length:
            raise self._refusal(
                descriptor, "there is no record header of this release: overwritten or never written"
            )
        body = bytes(view[GUARD.size : prefix])
        if zlib.crc32(body) != crc:
            raise self._refusal(
                descriptor, "the header's checksum is wrong: the record was damaged or overwritten"
            )
        try:
            is_same = body[_IDENTITY] == IDENTITY.pack(self._schema, self._run, *descriptor)
        except struct.error:  # a number that no record has
            is_same = False
        if not is_same:
            raise self._refusal(descriptor, self._difference(body))
        if flags & FLAG_PAYLOAD_CRC and zlib.crc32(view[prefix:]) != payload_crc:
            raise self._refusal(descriptor, "the payload's checksum is wrong: bytes changed after the commit")
        arrays = self._show(descriptor, base, body[BODY.size : head_start], prefix)
        self._num_opened += 1
        self._opened_bytes += length
        return Record(base, arrays, sequence, body[head_start:], is_copy=copy)

    def _show(
        self, descriptor: Descriptor, base: ByteArray, table: bytes, prefix: int
    ) -> tuple[AnyArray, ...]:
        """The arrays that a column table describes; numpy refuses what would end beyond the record."""
        arrays: list[AnyArray] = []
        try:
            for code, dims, zero, offset, a, b, c, d in COLUMN.iter_unpack(table):
                dtype = dtype_of(code)
                if dtype is None or dims > MAX_DIMS or zero or offset & 63 or offset < prefix:
                    raise ValueError("described by no rule of the layout")
                shape = (a,) if dims == 1 else (a, b, c, d)[:dims]
                arrays.append(np.ndarray(shape, dtype, base, offset))
        except (TypeError, ValueError) as error:
            raise self._refusal(descriptor, f"column {len(arrays)} is wrong: {error}") from None
        return tuple(arrays)

    def _difference(self, body: bytes) -> str:
        schema, run, *rest = IDENTITY.unpack(body[_IDENTITY])
        if schema != self._schema:
            return (
                f"its schema is {schema:#018x}, this reader's {self._schema:#018x}: they are of two releases"
            )
        if run != self._run:
            return f"it is of run {run:#018x}, this reader of {self._run:#018x}"
        return f"the bytes there say {Descriptor(*rest)}: the record was replaced, or the descriptor replayed"

    def _refusal(self, descriptor: Descriptor, reason: str) -> DescriptorRefused:
        self._num_refused += 1
        return DescriptorRefused(f"a record must be what its descriptor says; {descriptor}: {reason}")

    def statistics(self) -> ReaderStatistics:
        """Figures since the reader began."""
        return ReaderStatistics(
            num_opened=self._num_opened,
            num_refused=self._num_refused,
            opened_bytes=self._opened_bytes,
            num_watched=len(_ANCHORS),
        )


def _aligned_copy(source: ByteArray) -> ByteArray:
    """A private copy that begins at a multiple of 64 and owns no base that views would collapse to."""
    room = bytearray(source.size + ALIGNMENT)
    start = -np.frombuffer(room, np.uint8).ctypes.data % ALIGNMENT
    copied = np.frombuffer(room, np.uint8, source.size, start)
    copied[:] = source
    return copied
