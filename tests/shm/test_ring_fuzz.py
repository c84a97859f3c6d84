"""Damaged and forged headers and descriptors: refused, or exactly what was written, never out of bounds."""

import struct
import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shm import Descriptor, Field, Record, RingReader, RingWriter
from shm.errors import DescriptorRefused
from shm.ring import layout
from shm.ring.segment import Segment

_RING_BYTES = 1 << 16
_FIELDS = [Field("<i4", (100,)), Field("<f4", (3, 5)), Field(np.uint8, (2, 2, 2, 2)), Field("<i8", (0,))]
_HEAD = b"some scalars"
_U64 = st.integers(0, (1 << 64) - 1)
_ANY = st.integers(-(1 << 66), 1 << 66)
_FUZZ = settings(max_examples=200, deadline=None)


class Target:
    """A ring with one record, in a copy of whose bytes the damage is done."""

    def __init__(self) -> None:
        self.segment = Segment.create(_RING_BYTES)
        writer = RingWriter(self.segment, run=1, schema=2, incarnation=1, head=4096, tail=0, sequence=9)
        claim = writer.claim(_HEAD, _FIELDS)
        for array in claim.arrays:
            array[...] = 7
        self.descriptor = claim.commit()
        self.prefix_bytes = layout.plan(len(_HEAD), _FIELDS).prefix_bytes
        self.good = bytes(self.segment.array)
        self.reader = RingReader(self.segment, run=1, schema=2)

    def put(self, record: bytes) -> None:
        """Restore the ring, with other bytes where the record is."""
        self.segment.array[:] = np.frombuffer(self.good, np.uint8)
        self.segment.array[4096 : 4096 + len(record)] = np.frombuffer(record, np.uint8)

    @property
    def record(self) -> bytes:
        return self.good[4096 : 4096 + self.descriptor.length]

    def open(self, descriptor: Descriptor) -> Record | None:
        try:
            return self.reader.open(descriptor)
        except DescriptorRefused:
            return None


TARGET = Target()


@given(at=st.integers(0, TARGET.prefix_bytes - 1), flip=st.integers(1, 255))
@_FUZZ
def test_any_damage_to_header_table_or_head_is_refused(at: int, flip: int) -> None:
    damaged = bytearray(TARGET.record)
    damaged[at] ^= flip
    TARGET.put(damaged)
    assert TARGET.open(TARGET.descriptor) is None


@given(junk=st.binary(min_size=72, max_size=2000), at=st.integers(0, 1000))
@_FUZZ
def test_junk_over_a_record_is_refused(junk: bytes, at: int) -> None:
    at = min(at, TARGET.prefix_bytes - 1)
    TARGET.put(TARGET.record[:at] + junk)
    record = TARGET.open(TARGET.descriptor)
    assert record is None or junk.startswith(TARGET.record[at : at + len(junk)][: TARGET.prefix_bytes - at])


@given(
    num_columns=st.one_of(st.integers(0, 6), st.integers(0, 65535)),
    head_bytes=st.one_of(st.integers(0, 100), st.integers(0, (1 << 32) - 1)),
    flags=st.integers(0, 3),
    columns=st.lists(
        st.tuples(
            st.one_of(
                st.sampled_from([b"<i4\0", b"<f8\0", b"|u1\0", b"|O\0\0", b"<M8\0"]), st.binary(max_size=4)
            ),
            st.one_of(st.integers(0, 5), st.integers(0, 65535)),
            st.sampled_from([0, 0, 0, 1]),
            st.one_of(st.integers(0, 30).map(lambda n: 64 * n), _U64),
            *[st.one_of(st.integers(0, 20), st.integers(0, (1 << 32) - 1))] * 4,
        ),
        max_size=6,
    ),
)
@settings(max_examples=200, deadline=None)
def test_a_forged_header_shows_nothing_beyond_its_record(
    num_columns: int, head_bytes: int, flags: int, columns: list[tuple[object, ...]]
) -> None:
    """With a checksum that is right, as only a writer with a fault could make it."""
    table = b"".join(struct.pack("<4sHHQIIII", *column) for column in columns)
    descriptor = TARGET.descriptor
    body = layout.BODY.pack(layout.VERSION, num_columns, flags, head_bytes, 0, 2, 1, *descriptor)
    body = (body + table + _HEAD).ljust(descriptor.length - layout.GUARD.size, b"\0")
    prefix = layout.HEADER.size + num_columns * layout.COLUMN_BYTES + head_bytes
    crc = zlib.crc32(body[: prefix - layout.GUARD.size])
    TARGET.put((layout.GUARD.pack(layout.MAGIC, crc) + body)[: descriptor.length])
    record = TARGET.open(descriptor)
    if record is None:
        return
    start = TARGET.segment.address + 4096
    for array in record.arrays:
        low, high = np.lib.array_utils.byte_bounds(array)
        assert array.size == 0 or (start + prefix <= low and high <= start + descriptor.length)
        assert array.dtype.kind in "biufcV"
        array.tobytes()


@given(
    incarnation=st.one_of(st.just(1), _ANY),
    sequence=st.one_of(st.just(9), _ANY),
    position=st.one_of(st.just(4096), st.integers(-100_000, 100_000), _ANY),
    length=st.one_of(st.just(TARGET.descriptor.length), st.integers(-1000, 100_000), _ANY),
)
@_FUZZ
def test_a_descriptor_opens_its_own_record_or_nothing(
    incarnation: int, sequence: int, position: int, length: int
) -> None:
    TARGET.put(TARGET.record)
    descriptor = Descriptor(incarnation, sequence, position, length)
    record = TARGET.open(descriptor)
    assert (record is not None) == (descriptor == TARGET.descriptor)
