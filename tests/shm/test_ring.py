"""Rules of the ring's three roles that need no second process; see also the conformance suite."""

import numpy as np
import pytest

from shm import Descriptor, Field, RingReader, RingTable, RingWriter
from shm.errors import DescriptorRefused, LeaseError, RecordTooLarge, RingFull
from shm.ring.layout import plan
from shm.ring.segment import Segment

RUN, SCHEMA = 7, 11


class Ring:
    """Writer, table and reader of one ring, as three processes would hold them."""

    def __init__(self, size_bytes: int = 1 << 20, **options: bool) -> None:
        self.segment = Segment.create(size_bytes)
        self.table = RingTable(size_bytes)
        self.options = options
        self.writer = self.next_life()
        self.reader = RingReader(self.segment, run=RUN, schema=SCHEMA)

    def next_life(self) -> RingWriter:
        head, sequence = self.table.restart()
        return RingWriter(
            self.segment,
            run=RUN,
            schema=SCHEMA,
            incarnation=self.table.incarnation,
            head=head,
            tail=self.table.tail,
            sequence=sequence,
            **self.options,
        )

    def write(self, values: np.ndarray, head: bytes = b"head") -> Descriptor:
        with self.writer.claim(head, [Field(values.dtype, values.shape)]) as claim:
            claim.arrays[0][...] = values
            descriptor = claim.commit()
        self.table.admit(descriptor, self.writer.lowest_open)
        return descriptor

    def retire(self, descriptor: Descriptor) -> None:
        self.table.retire(descriptor.sequence)
        self.writer.set_tail(self.table.tail)


def test_views_are_read_only_and_copies_are_not() -> None:
    ring = Ring()
    descriptor = ring.write(np.arange(10, dtype="<i4"))
    record, copied = ring.reader.open(descriptor), ring.reader.open(descriptor, copy=True)
    with pytest.raises(ValueError, match="read-only"):
        record.arrays[0][0] = 1
    copied.arrays[0][0] = 99
    assert record.arrays[0][0] == 0


def test_a_claim_ends_once_and_its_arrays_are_closed_then() -> None:
    ring = Ring()
    claim = ring.writer.claim(b"", [Field("<i4", (4,))])
    claim.commit()
    with pytest.raises(ValueError, match="read-only"):
        claim.arrays[0][0] = 1
    for end in (claim.commit, claim.abort):
        with pytest.raises(LeaseError, match="ended before"):
            end()


def test_space_comes_back_when_the_last_lease_of_a_retired_record_ends() -> None:
    ring = Ring()
    descriptor = ring.write(np.zeros(1000))
    ring.table.lease(descriptor.sequence, "rank 0")
    ring.table.lease(descriptor.sequence, "rank 1")
    ring.table.lease(descriptor.sequence, "rank 1")
    ring.table.release(descriptor.sequence, "rank 1")
    ring.table.retire(descriptor.sequence)
    ring.table.release(descriptor.sequence, "rank 0")
    assert ring.table.tail == 0
    ring.table.release(descriptor.sequence, "rank 1")
    assert ring.table.tail == descriptor.length
    with pytest.raises(LeaseError, match="rank 1"):
        ring.table.release(descriptor.sequence, "rank 1")


def test_a_released_record_that_is_not_retired_may_be_leased_again() -> None:
    ring = Ring()
    descriptor = ring.write(np.zeros(10))
    for _ in range(3):
        ring.table.lease(descriptor.sequence, 0)
        ring.table.release(descriptor.sequence, 0)
    assert ring.table.tail == 0
    ring.table.discard(descriptor.sequence)
    assert ring.table.tail == descriptor.length
    with pytest.raises(LeaseError, match="free or never was"):
        ring.table.lease(descriptor.sequence, 0)


def test_the_leases_of_a_lost_holder_end_together() -> None:
    ring = Ring()
    first, second = ring.write(np.zeros(10)), ring.write(np.zeros(10))
    for descriptor in (second, first):
        ring.table.lease(descriptor.sequence, "lost")
        ring.table.retire(descriptor.sequence)
    ring.table.lease(second.sequence, "other")
    assert ring.table.release_all("lost") == [first.sequence, second.sequence]
    assert ring.table.tail == second.position
    assert ring.table.holders(second.sequence) == ("other",)


def test_claimable_is_what_the_next_claim_can_have() -> None:
    ring = Ring(1 << 16)
    random = np.random.default_rng(1)
    overhead = plan(0, [Field(np.uint8, (0,))]).length
    live: list[Descriptor] = []
    for _ in range(1000):
        room = ring.writer.claimable_bytes
        with pytest.raises((RingFull, RecordTooLarge)):
            ring.writer.claim(b"", [Field(np.uint8, (room - overhead + 1,))])
        if room >= overhead:
            ring.writer.claim(b"", [Field(np.uint8, (room - overhead,))]).abort()
        wanted = int(random.integers(0, 9000))
        if overhead + wanted + 64 <= room:
            live.append(ring.write(np.zeros(wanted, np.uint8)))
        else:
            ring.retire(live.pop(0))


def test_an_aborted_claim_leaves_no_trace() -> None:
    ring = Ring(1 << 16)
    for _ in range(100):
        with pytest.raises(ZeroDivisionError), ring.writer.claim(b"", [Field(np.uint8, (30000,))]):
            raise ZeroDivisionError
    assert ring.writer.statistics().num_aborted == 100
    assert ring.writer.lowest_open == 0


def test_open_claims_hold_the_tail_back_and_holes_do_not() -> None:
    ring = Ring()
    first = ring.writer.claim(b"", [Field("<i4", (10,))])
    second = ring.writer.claim(b"", [Field("<i4", (10,))])
    third = ring.writer.claim(b"", [Field("<i4", (10,))])
    later = second.commit()
    ring.table.admit(later, ring.writer.lowest_open)
    ring.table.retire(later.sequence)
    assert ring.table.tail == 0
    first.abort()
    ring.table.note_lowest_open(ring.writer.lowest_open)
    assert ring.table.tail == third.position
    descriptor = third.commit()
    ring.table.admit(descriptor, ring.writer.lowest_open)
    ring.table.retire(descriptor.sequence)
    assert ring.table.tail == ring.writer.lowest_open


def test_the_record_that_holds_the_ring_back_is_named() -> None:
    ring = Ring()
    descriptors = [ring.write(np.zeros(100)) for _ in range(4)]
    for descriptor in descriptors:
        ring.table.lease(descriptor.sequence, f"rank {descriptor.sequence}")
        ring.table.retire(descriptor.sequence)
    for descriptor in descriptors[1:]:
        ring.table.release(descriptor.sequence, f"rank {descriptor.sequence}")
    obstacle = ring.table.obstacle()
    assert obstacle is not None
    assert obstacle.sequence == descriptors[0].sequence
    assert obstacle.holders == ("rank 0",)
    assert obstacle.stuck_bytes == 3 * descriptors[0].length
    oldest = ring.table.oldest_lease()
    assert oldest is not None
    assert oldest[:2] == (descriptors[0].sequence, "rank 0")
    assert ring.table.statistics().span_bytes == 4 * descriptors[0].length
    ring.table.release(descriptors[0].sequence, "rank 0")
    assert ring.table.obstacle() is None


def test_descriptors_that_cannot_be_are_refused_and_change_nothing() -> None:
    ring = Ring()
    good = ring.write(np.zeros(100))
    spare = ring.writer.claim(b"", [Field("<i4", (10,))]).commit()
    before = ring.table.statistics()
    bad = [
        good,
        spare._replace(incarnation=0),
        spare._replace(sequence=good.sequence),
        spare._replace(position=good.position),
        spare._replace(position=spare.position - 64),
        spare._replace(position=spare.position + 1),
        spare._replace(position=-64),
        spare._replace(position=1 << 40),
        spare._replace(length=0),
        spare._replace(length=spare.length + 1),
        spare._replace(length=1 << 30),
    ]
    for descriptor in bad:
        with pytest.raises(DescriptorRefused):
            ring.table.admit(descriptor, ring.writer.lowest_open)
    for lowest_open in (-1, 0, 1 << 40):
        with pytest.raises(DescriptorRefused):
            ring.table.admit(spare, lowest_open)
    after = ring.table.statistics()
    assert after.num_refused == len(bad) + 3
    assert (after.tail, after.head, after.num_admitted) == (before.tail, before.head, before.num_admitted)
    ring.table.admit(spare, ring.writer.lowest_open)


def test_a_payload_that_changed_after_the_commit_is_refused() -> None:
    ring = Ring(checksum_payload=True)
    descriptor = ring.write(np.arange(1000))
    ring.reader.open(descriptor).close()
    ring.segment.array[descriptor.position + descriptor.length - 100] ^= 1
    with pytest.raises(DescriptorRefused, match="payload"):
        ring.reader.open(descriptor)
    assert ring.reader.statistics().num_refused == 1


def test_another_run_or_schema_is_refused_by_name() -> None:
    ring = Ring()
    descriptor = ring.write(np.zeros(3))
    with pytest.raises(DescriptorRefused, match="schema"):
        RingReader(ring.segment, run=RUN, schema=SCHEMA + 1).open(descriptor)
    with pytest.raises(DescriptorRefused, match="run"):
        RingReader(ring.segment, run=RUN + 1, schema=SCHEMA).open(descriptor)


def test_a_descriptor_that_comes_before_its_record_is_refused() -> None:
    ring = Ring()
    ring.write(np.arange(100))
    claim = ring.writer.claim(b"", [Field("<i4", (10,))])
    early = Descriptor(ring.table.incarnation, 1, claim.position, claim.length)
    with pytest.raises(DescriptorRefused, match="never written"):
        ring.reader.open(early)
    assert ring.reader.open(claim.commit()).sequence == early.sequence
