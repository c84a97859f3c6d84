"""The writer's end of a ring: owner of the head and of the open claims.

In: heads and array shapes. Out: arrays in the ring to fill, then descriptors to send.
Invariant: a claim ends in exactly one commit or abort; no byte between the tail that the hub told and the
head is given out twice; committed bytes are never touched again.
"""

import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from shm.errors import LeaseError, RecordTooLarge, RingFull, ShmError
from shm.fork import disarm_in_children
from shm.ring import layout
from shm.ring.layout import ALIGNMENT, Field, Plan
from shm.ring.segment import Segment
from shm.ring.words import Descriptor
from shm.statistics import WriterStatistics

AnyArray = npt.NDArray[Any]


class Claim:
    """Space in the ring for one record; ends in exactly one `commit` or `abort`, `with` aborts what is left.

    ```python
    with writer.claim(head, [Field("<i4", (num_tokens,)), Field("<f4", (2,))]) as claim:
        np.concatenate([sample.tokens for sample in samples], out=claim.arrays[0])
        claim.arrays[1][:] = 1.0, 0.5
        descriptor = claim.commit()
    ```
    """

    __slots__ = ("_head", "_plan", "_writer", "arrays", "length", "position")

    def __init__(
        self, writer: "RingWriter", position: int, plan: Plan, head: bytes, arrays: tuple[AnyArray, ...]
    ) -> None:
        self._writer: RingWriter | None = writer
        self._plan = plan
        self._head = head
        self.position = position
        self.length = plan.length
        self.arrays = arrays
        """Writable views of the ring, in the order of the fields; their bytes are what was there before."""

    def commit(self) -> Descriptor:
        """Close the record; the descriptor must be sent in the order of the commits.

        Raises:
            LeaseError: the claim has ended before.
        """
        return self._end()._commit(self, self._plan, self._head)

    def abort(self) -> None:
        """Give the space back.

        Raises:
            LeaseError: the claim has ended before.
        """
        self._end()._abort(self)

    def _end(self) -> "RingWriter":
        writer = self._writer
        if writer is None:
            raise LeaseError(
                f"a claim ends once, by commit or abort; the one at {self.position} has ended before"
            )
        self._writer = None
        return writer

    def __enter__(self) -> "Claim":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self.abort()


class RingWriter:
    """One life of the ring's only writer; not thread-safe."""

    def __init__(
        self,
        segment: Segment,
        *,
        run: int,
        schema: int,
        incarnation: int,
        head: int,
        tail: int,
        sequence: int,
        checksum_payload: bool = False,
    ) -> None:
        if not segment.writable:
            raise ValueError(
                "a ring is written through a segment attached with writable=True, this one is read-only"
            )
        self._bytes = segment.array
        self._view = segment.array.data
        self._size = segment.size_bytes & -ALIGNMENT
        self._identity = (schema, run, incarnation)
        self._incarnation = incarnation
        self._sequence = sequence
        self._head = head
        self._tail = tail
        self._flags = layout.FLAG_PAYLOAD_CRC if checksum_payload else 0
        self._open: dict[int, Claim] = {}
        """By position, which is the order of the claims: the first is the lowest."""
        self._armed = True
        self._num_committed = self._num_aborted = self._num_full = 0
        self._committed_bytes = self._padding_bytes = self._watermark = 0
        self.max_record_bytes = ((self._size + ALIGNMENT) // 2) & -ALIGNMENT
        """A larger record can never be sure of room: at most half of the ring, because records never wrap and
        the padding before one can cost as much as the record itself."""
        disarm_in_children(self)

    def claim(self, head: bytes, fields: Sequence[Field]) -> Claim:
        """Take space for a record; its arrays are to be filled in place.

        Raises:
            RecordTooLarge: it can never fit this ring.
            RingFull: it fits, but not now; `set_tail` makes room.
        """
        plan = layout.plan(len(head), fields)
        position = self._place(plan.length)
        offset = position % self._size
        ring = self._bytes
        arrays = tuple(
            [np.ndarray(shape, dtype, ring, offset + start) for dtype, shape, start in plan.arrays]
        )
        claim = Claim(self, position, plan, head, arrays)
        self._head = position + plan.length
        self._open[position] = claim
        return claim

    def _place(self, length: int) -> int:
        if not self._armed:
            raise ShmError("a ring is written by the process that attached it; this one is its forked child")
        if length > self.max_record_bytes:
            raise RecordTooLarge(
                f"a record must fit half of the ring, {self.max_record_bytes:,} of {self._size:,} bytes; "
                f"found one of {length:,}: raise ring.bytes to at least {2 * length:,}"
            )
        head = self._head
        room = self._size - head % self._size
        position = head if length <= room else head + room
        span = position + length - self._tail
        if span > self._size:
            self._num_full += 1
            raise RingFull(
                f"a record of {length:,} bytes must wait: {self._size - (head - self._tail):,} of "
                f"{self._size:,} bytes are free; records neither wrap nor overtake "
                f"the oldest one held (at {self._tail})"
            )
        # SYNC POINT tail-observed: the claim writes over bytes that the hub gave back (pairs with tail-told).
        self._padding_bytes += position - head
        if span > self._watermark:
            self._watermark = span
        return position

    def _commit(self, claim: Claim, plan: Plan, head: bytes) -> Descriptor:
        offset = claim.position % self._size
        view, prefix = self._view, plan.prefix_bytes
        for array in claim.arrays:
            array.setflags(write=False)  # a record is never altered after its commit
        payload_crc = zlib.crc32(view[offset + prefix : offset + plan.length]) if self._flags else 0
        num_columns = len(plan.arrays)
        counts = (layout.VERSION, num_columns, self._flags, len(head), payload_crc)
        body = layout.BODY.pack(*counts, *self._identity, self._sequence, claim.position, plan.length)
        body += layout.table_struct(num_columns).pack(*plan.table) + head
        # SYNC POINT record-written: header last; the descriptor's send publishes (pairs with record-opened).
        view[offset : offset + prefix] = layout.GUARD.pack(layout.MAGIC, zlib.crc32(body)) + body
        del self._open[claim.position]
        descriptor = Descriptor(self._incarnation, self._sequence, claim.position, plan.length)
        self._sequence += 1
        self._num_committed += 1
        self._committed_bytes += plan.length
        return descriptor

    def _abort(self, claim: Claim) -> None:
        for array in claim.arrays:
            array.setflags(write=False)
        del self._open[claim.position]
        self._num_aborted += 1
        if self._head == claim.position + claim.length:
            self._head = claim.position

    def set_tail(self, position: int) -> None:
        """Learn from the hub that all below `position` is free; idempotent, never goes back."""
        if position > self._head:
            raise ValueError(f"the tail cannot pass the head {self._head}, told {position}")
        self._tail = max(self._tail, position)

    @property
    def lowest_open(self) -> int:
        """Position of the oldest open claim, or the head: all below is committed or a hole."""
        return next(iter(self._open), self._head)

    @property
    def claimable_bytes(self) -> int:
        """The largest record that `claim` would take now: less than is free, since records never wrap."""
        free = self._size - (self._head - self._tail)
        before_end = self._size - self._head % self._size
        return min(max(min(free, before_end), free - before_end), self.max_record_bytes)

    def disarm(self) -> None:
        """Refuse every further claim."""
        self._armed = False

    def statistics(self) -> WriterStatistics:
        """Figures since this writer began."""
        return WriterStatistics(
            size_bytes=self._size,
            head=self._head,
            tail=self._tail,
            lowest_open=self.lowest_open,
            num_open=len(self._open),
            num_committed=self._num_committed,
            num_aborted=self._num_aborted,
            num_full=self._num_full,
            committed_bytes=self._committed_bytes,
            padding_bytes=self._padding_bytes,
            claimable_bytes=self.claimable_bytes,
            watermark_bytes=self._watermark,
        )
