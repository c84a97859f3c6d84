"""The hub's book of a ring: which records live, who leases them, where the tail stands.

In: descriptors in the order of their commits, leases and their ends in any order. Out: the tail.
Invariant: no position below the tail belongs to a record that somebody may still read or to a claim that may
still be committed; the tail never goes back. It touches no byte of the ring, and outlives every writer.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Hashable

from shm.errors import DescriptorRefused, LeaseError
from shm.ring.layout import ALIGNMENT, HEADER
from shm.ring.words import Descriptor
from shm.statistics import Obstacle, TableStatistics


class _Live:
    __slots__ = ("end", "free", "leases", "position", "retired", "sequence", "since_s")

    def __init__(self, sequence: int, position: int, end: int) -> None:
        self.sequence = sequence
        self.position = position
        self.end = end
        self.retired = False
        self.free = False
        self.leases: dict[Hashable, list[float]] = {}
        """Holder -> when each of its leases began."""
        self.since_s = time.monotonic()


class RingTable:
    """Records and leases of one ring, over all lives of its writer.

    A record is free when it is retired and no lease of it is left.
    """

    def __init__(self, size_bytes: int, *, on_free: Callable[[int, int], object] | None = None) -> None:
        self._size = size_bytes & -ALIGNMENT
        self._on_free = on_free
        """Called with (position, length) of each record that becomes free; poison mode overwrites it."""
        self.incarnation = 0
        """Life of the writer whose descriptors are taken; `restart` begins the next."""
        self._live: dict[int, _Live] = {}
        self._held: dict[Hashable, dict[int, int]] = {}
        """Holder -> sequence -> number of leases."""
        self._order: list[_Live] = []
        """By position, from the tail on; freed ones stay until the tail passes them."""
        self._positions: list[int] = []
        self._head = 0
        self._lowest_open = 0
        self._last_sequence = -1
        self._live_bytes = self._watermark = 0
        self._num_admitted = self._num_refused = self._num_freed = self._num_leases = 0
        self.tail = 0
        """All below is free; tell the writer when it has moved."""

    # --- the writer's news --------------------------------------------------------------------------

    def admit(self, descriptor: Descriptor, lowest_open: int) -> None:
        """Take a commit in; `lowest_open` is the writer's just after it.

        Raises:
            DescriptorRefused: the descriptor is of another life, out of bounds, overlaps a record, or came
                before; the table is as it was.
        """
        # SYNC POINT commit-received: from here on the record outlives its writer (pairs with record-written).
        index = bisect_left(self._positions, descriptor.position)
        fault = self._fault(descriptor, lowest_open, index)
        if fault is not None:
            self._num_refused += 1
            raise DescriptorRefused(f"{fault}; {descriptor} is refused, nothing of it is read")
        _, sequence, position, length = descriptor
        live = _Live(sequence, position, position + length)
        self._live[sequence] = live
        self._order.insert(index, live)
        self._positions.insert(index, position)
        self._last_sequence = sequence
        self._lowest_open = lowest_open
        self._live_bytes += length
        self._num_admitted += 1
        if live.end > self._head:
            self._head = live.end
        self._note_head(lowest_open)

    def note_lowest_open(self, lowest_open: int) -> None:
        """Learn that claims below were aborted, without a commit that says so.

        Raises:
            DescriptorRefused: the position is none that this life of the writer can tell.
        """
        if not self._lowest_open <= lowest_open <= self.tail + self._size:
            self._num_refused += 1
            raise DescriptorRefused(
                f"the lowest open claim must lie from {self._lowest_open} to {self.tail + self._size}, "
                f"told {lowest_open}: it is not of this ring"
            )
        self._lowest_open = lowest_open
        self._note_head(lowest_open)

    def _note_head(self, lowest_open: int) -> None:
        if lowest_open > self._head:
            self._head = lowest_open
        self._move_tail()
        if self._head - self.tail > self._watermark:
            self._watermark = self._head - self.tail

    def _fault(self, descriptor: Descriptor, lowest_open: int, index: int) -> str | None:
        """What is wrong with a descriptor; None when nothing is."""
        life, sequence, position, length = descriptor
        end, limit = position + length, self.tail + self._size
        if life != self.incarnation:
            return f"a commit must come from life {self.incarnation} of the writer, found {life}"
        if sequence <= self._last_sequence:
            return f"sequence numbers must rise, the last was {self._last_sequence}: lost order, or a replay"
        if length < HEADER.size or (position | length) & 63 or position < 0:
            return f"position and length must be multiples of {ALIGNMENT}, the length at least {HEADER.size}"
        if position % self._size + length > self._size:
            return f"a record must end inside the ring of {self._size:,} bytes and not wrap"
        if position < self._lowest_open:
            return f"no claim below {self._lowest_open} was open: overlaps an older record, or a replay"
        if end > limit or not self._lowest_open <= lowest_open <= limit:
            return f"a claim lies within one ring from the tail {self.tail} (lowest open {lowest_open})"
        if (index and self._order[index - 1].end > position) or (
            index < len(self._order) and self._positions[index] < end
        ):
            return "records must not overlap"
        return None

    def restart(self) -> tuple[int, int]:
        """Begin the next life of the writer: (head, sequence) that it starts with, under `self.incarnation`.

        Only after the last one is provably gone and what it sent was admitted: its open claims become holes.
        """
        # SYNC POINT writer-replaced: waitpid came before, no store can follow (pairs with record-written).
        self.incarnation += 1
        self._lowest_open = self._head
        self._move_tail()
        return self._head, self._last_sequence + 1

    # --- leases -------------------------------------------------------------------------------------

    def lease(self, sequence: int, holder: Hashable) -> None:
        """Note that `holder` may read a record; as often as it likes, each lease ends by its own release.

        Raises:
            LeaseError: no such record lives.
        """
        live = self._live.get(sequence)
        if live is None:
            raise LeaseError(f"only a record that lives can be leased; {sequence} is free or never was")
        now_s = time.monotonic()
        begun = live.leases.get(holder)
        if begun is None:
            live.leases[holder] = [now_s]
        else:
            begun.append(now_s)
        held = self._held.get(holder)
        if held is None:
            held = self._held[holder] = {}
        held[sequence] = held.get(sequence, 0) + 1
        self._num_leases += 1

    def release(self, sequence: int, holder: Hashable) -> None:
        """End one lease.

        Raises:
            LeaseError: the holder has none of this record: released twice, or by another.
        """
        live = self._live.get(sequence)
        begun = live.leases.get(holder) if live is not None else None
        if live is None or not begun:
            raise LeaseError(f"a lease ends once, by its holder; {holder!r} has none of record {sequence}")
        # SYNC POINT release-received: the holder's loads are over (pairs with record-released).
        begun.pop()
        held = self._held[holder]
        held[sequence] -= 1
        self._num_leases -= 1
        if not begun:
            del live.leases[holder], held[sequence]
            if not held:
                del self._held[holder]
            if live.retired and not live.leases:
                self._free(live)

    def release_all(self, holder: Hashable) -> list[int]:
        """End all leases of a holder that is gone; returns the records it held, oldest first."""
        held = self._held.pop(holder, {})
        for sequence, count in held.items():
            live = self._live[sequence]
            del live.leases[holder]
            self._num_leases -= count
            if live.retired and not live.leases:
                self._free(live)
        return sorted(held)

    def retire(self, sequence: int) -> None:
        """Nobody will lease this record again: it is free when its last lease ends; idempotent.

        Raises:
            LeaseError: no such record was ever admitted.
        """
        live = self._live.get(sequence)
        if live is None:
            if sequence > self._last_sequence or sequence < 0:
                raise LeaseError(f"only an admitted record can be retired; {sequence} never was")
            return
        live.retired = True
        if not live.leases:
            self._free(live)

    def discard(self, sequence: int) -> None:
        """A record that will not be used (stale, filtered); the same as `retire`."""
        self.retire(sequence)

    # --- room ---------------------------------------------------------------------------------------

    def _free(self, live: _Live) -> None:
        live.free = True
        del self._live[live.sequence]
        length = live.end - live.position
        self._live_bytes -= length
        self._num_freed += 1
        if self._on_free is not None:
            self._on_free(live.position, length)
        if live is self._order[0]:
            self._move_tail()

    def _move_tail(self) -> None:
        order, lowest_open, count = self._order, self._lowest_open, 0
        for live in order:
            if not live.free or live.end > lowest_open:
                break
            count += 1
        if count:
            del order[:count], self._positions[:count]
        tail = order[0].position if order and order[0].position < lowest_open else lowest_open
        # SYNC POINT tail-told: what is sent after this may be overwritten (pairs with tail-observed).
        self.tail = tail

    @property
    def claimable_bytes(self) -> int:
        """Bytes that claims can count on: the ring less its span, less padding for a largest record."""
        longest = max((live.end - live.position for live in self._order), default=0)
        return max(0, self._size - (self._head - self.tail) - longest)

    def oldest_lease(self) -> tuple[int, Hashable, float] | None:
        """(sequence, holder, age in seconds) of the lease that began first; None without leases."""
        found = min(
            (
                (begun[0], live.sequence, holder)
                for live in self._live.values()
                for holder, begun in live.leases.items()
            ),
            key=lambda entry: entry[:2],
            default=None,
        )
        return None if found is None else (found[1], found[2], time.monotonic() - found[0])

    def obstacle(self) -> Obstacle | None:
        """What holds the tail back; None when the ring is empty or only an open claim does."""
        if not self._order or self._order[0].position != self.tail or self._order[0].free:
            return None
        live = self._order[0]
        since_s = min((begun[0] for begun in live.leases.values()), default=live.since_s)
        return Obstacle(
            sequence=live.sequence,
            holders=tuple(live.leases),
            age_s=time.monotonic() - since_s,
            length=live.end - live.position,
            stuck_bytes=sum(other.end - other.position for other in self._order if other.free),
        )

    def num_held(self, holder: Hashable) -> int:
        """Records that a holder leases."""
        return len(self._held.get(holder, ()))

    def holders(self, sequence: int) -> tuple[Hashable, ...]:
        """Who leases a record; empty when nobody does or it is free."""
        live = self._live.get(sequence)
        return () if live is None else tuple(live.leases)

    def statistics(self) -> TableStatistics:
        """Figures since the table began."""
        oldest = self.oldest_lease()
        return TableStatistics(
            size_bytes=self._size,
            tail=self.tail,
            head=self._head,
            num_live=len(self._live),
            num_leases=self._num_leases,
            live_bytes=self._live_bytes,
            span_bytes=self._head - self.tail,
            watermark_bytes=self._watermark,
            num_admitted=self._num_admitted,
            num_refused=self._num_refused,
            num_freed=self._num_freed,
            oldest_lease_s=0.0 if oldest is None else oldest[2],
        )
