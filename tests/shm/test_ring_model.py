"""The ring against a plain model: claims, commits, aborts, leases, clones, releases, deaths in any order."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from shm import Claim, Descriptor, Field, Record, RingReader, RingTable, RingWriter
from shm.errors import DescriptorRefused, RecordTooLarge, RingFull
from shm.ring.layout import plan
from shm.ring.segment import Segment

_RING_BYTES = 1 << 14
_NUM_READERS = 3


class Model:
    """What is known of one record without looking at the ring."""

    def __init__(self, descriptor: Descriptor, content: bytes) -> None:
        self.descriptor = descriptor
        self.content = content
        self.leases: list[int] = []
        """Reader of each lease that has not ended."""
        self.retired = False

    @property
    def is_free(self) -> bool:
        return self.retired and not self.leases


class Lease:
    """One lease as its reader holds it: handles, and views that outlive them."""

    def __init__(self, model: Model, reader: int, record: Record) -> None:
        self.model = model
        self.reader = reader
        self.handles = [record]
        self.views: list[np.ndarray] = []


class RingMachine(RuleBasedStateMachine):
    """A writer, a table, three readers; what a hub does between them is done step by step, in any order."""

    sizes = st.one_of(st.integers(0, 600), st.integers(2000, 5000))
    claims = Bundle("claims")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.segment = Segment.create(_RING_BYTES)
        self.table = RingTable(_RING_BYTES, on_free=self._poison)
        self.readers = [RingReader(self.segment, run=1, schema=2) for _ in range(_NUM_READERS)]
        self.records: dict[int, Model] = {}
        self.claimed: dict[int, bytes] = {}
        """Position of each open claim -> what was written there."""
        self.unsent: list[tuple[Model, int]] = []
        self.ended: list[tuple[int, int]] = []
        """(sequence, reader) of releases that the hub has not heard of."""
        self.num_lives = self.num_claimed = 0
        self._next_writer()

    def _poison(self, position: int, length: int) -> None:
        start = position % _RING_BYTES
        self.segment.array[start : start + length] = 0xDB

    def _next_writer(self) -> None:
        head, sequence = self.table.restart()
        self.num_lives += 1
        self.writer = RingWriter(
            self.segment,
            run=1,
            schema=2,
            incarnation=self.num_lives,
            head=head,
            tail=self.table.tail,
            sequence=sequence,
            checksum_payload=True,
        )

    # --- the writer ---------------------------------------------------------------------------------

    @rule(target=claims, size=sizes, head_bytes=st.integers(0, 200))
    def claim(self, size: int, head_bytes: int) -> object:
        return self._claim(size, head_bytes) or multiple()

    @rule(new_sizes=st.lists(sizes, min_size=1, max_size=4))
    def write(self, new_sizes: list[int]) -> None:
        """The usual way: claimed, committed and admitted at once, behind what else was sent."""
        for size in new_sizes:
            claim = self._claim(size, 10)
            if claim is not None:
                self._commit(claim)
        while self.unsent:
            self.admit()

    def _claim(self, size: int, head_bytes: int) -> Claim | None:
        self.num_claimed += 1
        content = np.random.default_rng(self.num_claimed).bytes(size)
        head = bytes(head_bytes)
        fields = [Field(np.uint8, (len(content),)), Field("<i8", (1, 1))]
        length = plan(len(head), fields).length
        claimable = self.writer.claimable_bytes
        try:
            claim = self.writer.claim(head, fields)
        except RingFull:
            assert length > claimable
            return None
        assert length <= claimable
        claim.arrays[0][:] = np.frombuffer(content, np.uint8)
        claim.arrays[1][...] = len(content)
        self.claimed[claim.position] = content
        return claim

    @rule()
    def claim_too_much(self) -> None:
        with pytest.raises(RecordTooLarge):
            self.writer.claim(b"", [Field(np.uint8, (_RING_BYTES // 2 + 1,))])

    @rule(claim=consumes(claims))
    def commit(self, claim: Claim) -> None:
        if self._is_open(claim):
            self._commit(claim)

    def _commit(self, claim: Claim) -> None:
        model = Model(claim.commit(), self.claimed.pop(claim.position))
        self.unsent.append((model, self.writer.lowest_open))

    @rule(claim=consumes(claims))
    def abort(self, claim: Claim) -> None:
        if self._is_open(claim):
            claim.abort()
            del self.claimed[claim.position]

    def _is_open(self, claim: Claim) -> bool:
        return claim._writer is self.writer

    @rule()
    def tell_tail(self) -> None:
        self.writer.set_tail(self.table.tail)

    @rule(chance=st.integers(0, 4))
    def writer_dies(self, chance: int) -> None:
        """Claims and commits that were not sent are lost; what was sent counts."""
        if chance:
            return
        self.claimed.clear()
        self.unsent.clear()
        self._next_writer()

    # --- the hub ------------------------------------------------------------------------------------

    @precondition(lambda self: self.unsent)
    @rule()
    def admit(self) -> None:
        model, lowest_open = self.unsent.pop(0)
        self.table.admit(model.descriptor, lowest_open)
        self.records[model.descriptor.sequence] = model
        with pytest.raises(DescriptorRefused):
            self.table.admit(model.descriptor, lowest_open)

    @precondition(lambda self: not self.unsent)
    @rule()
    def hear_of_holes(self) -> None:
        self.table.note_lowest_open(self.writer.lowest_open)

    @rule(data=st.data())
    def admit_nonsense(self, data: st.DataObject) -> None:
        number = st.integers(-(1 << 62), 1 << 62)
        descriptor = Descriptor(*(data.draw(number) for _ in range(4)))
        with pytest.raises(DescriptorRefused):
            self.table.admit(descriptor, data.draw(number))

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        self._retire(data.draw(st.sampled_from(sorted(self.records))))

    def _retire(self, sequence: int) -> None:
        self.table.retire(sequence)
        self.records[sequence].retired = True
        self._forget_free()

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def hear_of_release(self, data: st.DataObject) -> None:
        self._hear_of_release(data.draw(st.integers(0, len(self.ended) - 1)))

    def _hear_of_release(self, index: int) -> None:
        sequence, reader = self.ended.pop(index)
        self.table.release(sequence, reader)
        self.records[sequence].leases.remove(reader)
        self._forget_free()

    def _forget_free(self) -> None:
        self.records = {s: model for s, model in self.records.items() if not model.is_free}

    # --- the readers --------------------------------------------------------------------------------

    @precondition(lambda self: self.records)
    @rule(target=leases, data=st.data(), reader=st.integers(0, _NUM_READERS - 1))
    def lease(self, data: st.DataObject, reader: int) -> Lease:
        model = self.records[data.draw(st.sampled_from(sorted(self.records)))]
        self.table.lease(model.descriptor.sequence, reader)
        model.leases.append(reader)
        record = self.readers[reader].open(model.descriptor)
        record.on_release(lambda sequence: self.ended.append((sequence, reader)))
        return Lease(model, reader, record)

    @rule(lease=leases)
    def keep_view(self, lease: Lease) -> None:
        if lease.handles:
            lease.views.append(lease.handles[-1].arrays[0][1:][::2])

    @rule(lease=leases)
    def clone(self, lease: Lease) -> None:
        if lease.handles:
            lease.handles.append(lease.handles[0].clone())

    @rule(lease=consumes(leases), retired=st.booleans())
    def end(self, lease: Lease, retired: bool) -> None:
        """The usual way: a reader is done, the hub hears of it and tells the writer."""
        while lease.views:
            self.drop_view(lease)
        while lease.handles:
            self.close_handle(lease)
        while self.ended:
            self._hear_of_release(0)
        if retired and lease.model.descriptor.sequence in self.records:
            self._retire(lease.model.descriptor.sequence)
        self.tell_tail()

    @rule(lease=leases)
    def close_handle(self, lease: Lease) -> None:
        before = len(self.ended)
        if lease.handles:
            lease.handles.pop().close()
            assert len(self.ended) - before == (not lease.handles and not lease.views)

    @rule(lease=leases)
    def drop_view(self, lease: Lease) -> None:
        before = len(self.ended)
        if lease.views:
            lease.views.pop()
            assert len(self.ended) - before == (not lease.handles and not lease.views)

    # --- what must hold -----------------------------------------------------------------------------

    @invariant()
    def tail_is_below_all_that_lives(self) -> None:
        positions = [model.descriptor.position for model in self.records.values()]
        positions += list(self.claimed) + [model.descriptor.position for model, _ in self.unsent]
        assert self.table.tail <= min([*positions, self.writer.lowest_open])

    @invariant()
    def records_read_as_written(self) -> None:
        for model in self.records.values():
            with self.readers[0].open(model.descriptor) as record:
                assert record.arrays[0].tobytes() == model.content
                assert record.arrays[1].tolist() == [[len(model.content)]]

    @invariant()
    def counts_agree(self) -> None:
        figures = self.table.statistics()
        assert figures.num_live == len(self.records)
        assert figures.num_leases == sum(len(model.leases) for model in self.records.values())
        assert figures.live_bytes == sum(model.descriptor.length for model in self.records.values())
        assert figures.live_bytes <= figures.span_bytes <= _RING_BYTES

    def teardown(self) -> None:
        """Whatever came before: when all is over, the ring is empty and takes the largest record."""
        for model, lowest_open in self.unsent:
            self.table.admit(model.descriptor, lowest_open)
            self.records[model.descriptor.sequence] = model
        for reader in range(_NUM_READERS):
            self.table.release_all(reader)
        for sequence in self.records:
            self.table.retire(sequence)
        self.writer = self._fresh_writer()
        self.writer.claim(b"", [Field(np.uint8, (self.writer.max_record_bytes - 192,))])
        self.segment.close()

    def _fresh_writer(self) -> RingWriter:
        self._next_writer()
        assert self.table.tail == self.writer.lowest_open
        return self.writer


TestRing = RingMachine.TestCase
TestRing.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
