"""What the ring promises, kept in one process and in several."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from ring_rig import Local, Remote, Rig

from shm import Field
from shm.errors import DescriptorRefused, RecordTooLarge, RingFull
from shm.ring.layout import plan

MakeRig = Callable[..., Rig]


@pytest.fixture(params=[Local, Remote], ids=["one process", "several processes"])
def make_rig(request: pytest.FixtureRequest) -> Iterator[MakeRig]:
    with ExitStack() as stack:

        def make(size_bytes: int = 1 << 18, **options: Any) -> Rig:
            return stack.enter_context(Rig(request.param, size_bytes, **options))

        yield make


def values_of(seed: int, size: int = 500) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8)


def test_what_is_committed_is_what_is_read(make_rig: MakeRig) -> None:
    rig = make_rig()
    arrays = [
        np.arange(1000, dtype="<i4"),
        np.linspace(-1, 1, 77, dtype="<f4"),
        np.arange(24, dtype=np.uint16).reshape(2, 3, 4),
        np.empty(0, np.uint8),
        np.empty((3, 0), np.int64),
        np.arange(120, dtype=np.float64).reshape(2, 3, 4, 5),
    ]
    descriptor = rig.write(*arrays, head=b"scalars")
    head, read = rig.readers[0].ask("open", 0, descriptor)
    assert head == b"scalars"
    for found, expected in zip(read, arrays, strict=True):
        np.testing.assert_array_equal(found, expected)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)


def test_the_ring_goes_round_with_records_of_any_size(make_rig: MakeRig) -> None:
    rig = make_rig(1 << 16)
    random = np.random.default_rng(0)
    for seed in range(200):
        values = values_of(seed, int(random.integers(0, 20000)))
        descriptor = rig.write(values)
        number, (found,) = rig.open(descriptor, seed % 2)
        np.testing.assert_array_equal(found, values)
        rig.readers[seed % 2].ask("close", number)
        rig.collect()
        rig.retire(descriptor)
    assert rig.table.tail > 10 * (1 << 16)


def test_claims_end_in_any_order_and_holes_close(make_rig: MakeRig) -> None:
    rig = make_rig()
    claims = [rig.claim(values_of(seed)) for seed in range(6)]
    committed = {seed: rig.commit(claims[seed]) for seed in (4, 1, 2)}
    for seed in (3, 0):
        rig.table.note_lowest_open(rig.writer.ask("abort", claims[seed]))
    committed[5] = rig.commit(claims[5])
    for seed, descriptor in committed.items():
        number, (found,) = rig.open(descriptor)
        np.testing.assert_array_equal(found, values_of(seed))
        rig.readers[0].ask("close", number)
        rig.retire(descriptor)
    rig.collect()
    assert rig.table.tail == rig.writer.ask("figures").head


def test_memory_comes_back_when_the_last_of_several_readers_is_done(make_rig: MakeRig) -> None:
    rig = make_rig()
    descriptor = rig.write(values_of(0))
    first, second = rig.open(descriptor, 0)[0], rig.open(descriptor, 1)[0]
    rig.retire(descriptor)
    rig.readers[0].ask("close", first)
    assert rig.collect() == [(0, descriptor.sequence)]
    assert rig.table.tail == 0
    rig.readers[1].ask("close", second)
    assert rig.collect() == [(1, descriptor.sequence)]
    assert rig.table.tail == descriptor.length


def test_held_bytes_do_not_change_however_often_the_ring_wants_them(make_rig: MakeRig) -> None:
    rig = make_rig(1 << 16)
    held = rig.write(values_of(0, 10_000))
    number, _ = rig.open(held)
    rig.retire(held)
    seed, num_full = 1, 0
    while num_full < 3:
        try:
            rig.retire(rig.write(values_of(seed, 9_000)))
        except RingFull:
            num_full += 1
        seed += 1
    np.testing.assert_array_equal(rig.readers[0].ask("read", number)[0], values_of(0, 10_000))
    assert rig.table.obstacle().holders == (0,)
    rig.readers[0].ask("close", number)
    rig.collect()
    for seed in range(30):
        rig.retire(rig.write(values_of(seed, 9_000)))


def test_leaving_a_record_under_a_live_view_defers_its_return(make_rig: MakeRig) -> None:
    rig = make_rig()
    values = np.arange(4000, dtype="<i4").reshape(100, 40)
    descriptor = rig.write(values, values)
    number, _ = rig.open(descriptor)
    rig.retire(descriptor)
    rig.readers[0].ask("keep_view", number, 1)
    assert rig.readers[0].ask("is_held", number)
    rig.readers[0].ask("close", number)
    assert rig.collect() == []
    np.testing.assert_array_equal(rig.readers[0].ask("read_view", number), values[1:].reshape(-1)[::2])
    rig.readers[0].ask("drop_view", number)
    assert rig.collect() == [(0, descriptor.sequence)]
    assert rig.table.tail == descriptor.length


def test_a_clone_holds_the_record_on_its_own(make_rig: MakeRig) -> None:
    rig = make_rig()
    descriptor = rig.write(values_of(3))
    number, _ = rig.open(descriptor)
    clone = rig.number()
    assert not rig.readers[0].ask("is_held", number)
    rig.readers[0].ask("clone", number, clone)
    assert rig.readers[0].ask("is_held", number)
    rig.readers[0].ask("close", number)
    assert rig.collect() == []
    np.testing.assert_array_equal(rig.readers[0].ask("read", clone)[0], values_of(3))
    rig.readers[0].ask("close", clone)
    assert rig.collect() == [(0, descriptor.sequence)]


def test_a_copy_outlives_its_record(make_rig: MakeRig) -> None:
    rig = make_rig(1 << 16, poison=True)
    descriptor = rig.write(values_of(1))
    number, _ = rig.open(descriptor, copy=True)
    assert rig.collect() == [(0, descriptor.sequence)]
    rig.retire(descriptor)
    for seed in range(100):
        rig.retire(rig.write(values_of(seed, 5000)))
    np.testing.assert_array_equal(rig.readers[0].ask("read", number)[0], values_of(1))


def test_what_can_never_fit_is_told_from_what_must_wait(make_rig: MakeRig) -> None:
    rig = make_rig(1 << 16)
    largest = rig.writer.ask("max_record_bytes")
    room = largest - plan(0, [Field(np.uint8, (0,))]).length
    with pytest.raises(RecordTooLarge, match=r"ring\.bytes"):
        rig.claim(values_of(0, room + 1))
    for seed in range(10):  # an empty ring takes the largest record wherever its head stands
        rig.retire(rig.write(values_of(0, 37 * seed)))
        descriptor = rig.write(values_of(seed, room))
        assert descriptor.length == largest
        with pytest.raises(RingFull, match="must wait"):
            rig.claim(values_of(0, room))
        rig.retire(descriptor)


def test_a_new_life_of_the_writer_goes_on_behind_what_was_admitted(make_rig: MakeRig) -> None:
    rig = make_rig()
    kept = rig.write(values_of(0))
    unsent, lowest_open = rig.writer.ask("commit", rig.claim(values_of(1)))
    rig.claim(values_of(2))
    rig.start_writer()
    with pytest.raises(DescriptorRefused, match="life 2"):
        rig.table.admit(unsent, lowest_open)
    fresh = rig.write(values_of(3))
    assert (fresh.position, fresh.sequence) == (unsent.position, unsent.sequence)
    with pytest.raises(DescriptorRefused, match="replaced"):
        rig.readers[0].ask("open", rig.number(), unsent)
    for descriptor, seed in ((kept, 0), (fresh, 3)):
        np.testing.assert_array_equal(rig.open(descriptor)[1][0], values_of(seed))


def test_a_damaged_foreign_cut_or_replayed_record_is_refused_and_counted(make_rig: MakeRig) -> None:
    rig = make_rig(checksum_payload=True)
    descriptor = rig.write(values_of(0), head=b"head")
    other = rig.write(values_of(1))
    array, reader = rig.segment.array, rig.readers[0]
    wrong = [
        descriptor._replace(length=descriptor.length - 64),
        descriptor._replace(length=1 << 40),
        descriptor._replace(position=descriptor.position + rig.segment.size_bytes),
        descriptor._replace(position=-64),
        descriptor._replace(position=other.position),
        descriptor._replace(sequence=other.sequence),
        descriptor._replace(incarnation=descriptor.incarnation + 1),
    ]
    for foreign in wrong:
        with pytest.raises(DescriptorRefused, match="must be what its descriptor says"):
            reader.ask("open", rig.number(), foreign)
    damaged = [0, 5, 20, 64, 74, 105, 200, descriptor.length - 1]
    for offset in damaged:
        array[offset] ^= 0x10
        with pytest.raises(DescriptorRefused):
            reader.ask("open", rig.number(), descriptor)
        array[offset] ^= 0x10
    assert reader.ask("figures").num_refused == len(wrong) + len(damaged)
    np.testing.assert_array_equal(rig.open(descriptor)[1][0], values_of(0))


def test_freed_bytes_can_be_poisoned_so_that_a_stale_use_shows(make_rig: MakeRig) -> None:
    rig = make_rig(poison=True)
    descriptor = rig.write(values_of(0))
    number, _ = rig.open(descriptor)
    rig.table.retire(descriptor.sequence)
    np.testing.assert_array_equal(rig.readers[0].ask("read", number)[0], values_of(0))
    rig.table.release(descriptor.sequence, 0)  # a lease that ends before its view does
    assert (rig.readers[0].ask("read", number)[0] == 0xDB).all()
    with pytest.raises(DescriptorRefused, match="no record header"):
        rig.readers[0].ask("open", rig.number(), descriptor)
