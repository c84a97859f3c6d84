"""This project's ring as a contender: writer to reader, and through a hub in a process of its own.

Descriptors go several to a message, as a loop's turn sends them. Every record is leased, verified, watched by
a weak reference, and given back when its last tensor is dropped.
"""

import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch

from benchmarks.transport.contender import Received
from benchmarks.transport.workload import NUM_SAMPLES, Form, Group
from shm import Descriptor, Field, Record, RingReader, RingTable, RingWriter
from shm.channels.channel import Channel
from shm.errors import ChannelClosed, RingFull
from shm.ring.segment import Segment

_RING_BYTES = 64 << 20
_SMALL_RING_BYTES = 12 << 20
_BATCH = 16
_BATCH_BYTES = 4 << 20
"""Descriptors wait for company only while few bytes do."""
_RUN, _SCHEMA = 1, 2
_HEAD = struct.Struct(f"<q{NUM_SAMPLES}I")
_COMMIT = struct.Struct("<5Q")
_HANDOUT = struct.Struct("<4Q")
_NUMBER = struct.Struct("<Q")


class Passed:
    """Descriptors that a spawned process gets as its own."""

    def __init__(self, fds: list[int]) -> None:
        self.fds = fds

    def __getstate__(self) -> list[Any]:
        return [DupFd(fd) for fd in self.fds]

    def __setstate__(self, state: list[Any]) -> None:
        self.fds = [fd.detach() for fd in state]


class Ring:
    """Segment and sockets, and perhaps a hub between them."""

    def __init__(self, context: SpawnContext, *, hub: bool, size_bytes: int = _RING_BYTES) -> None:
        segment = Segment.create(size_bytes)
        self.max_group_bytes = int(0.45 * size_bytes)
        self._has_hub = hub
        self._helper: Any = None
        self._ask: Connection | None = None
        writer, reader = socket.socketpair()
        if hub:
            writer, hub_writer = socket.socketpair()
            reader, hub_reader = socket.socketpair()
            self._ask, answer = context.Pipe()
            ends = Passed([hub_writer.fileno(), hub_reader.fileno()])
            self._helper = context.Process(target=run_hub, args=(ends, answer))
            self._helper.start()
            hub_writer.close()
            hub_reader.close()
        self._parent: Any = (segment, writer, reader)
        self._passed = Passed([segment.fd, writer.fileno(), reader.fileno()])

    def __getstate__(self) -> dict[str, Any]:
        return {"_passed": self._passed, "_has_hub": self._has_hub}

    def producer(self) -> "RingProducer":
        ring, writer, reader = self._passed.fds
        os.close(reader)
        return RingProducer(Segment.attach(ring, writable=True), _channel(writer), has_hub=self._has_hub)

    def consumer(self) -> "RingConsumer":
        ring, writer, reader = self._passed.fds
        os.close(writer)
        return RingConsumer(Segment.attach(ring, writable=False), _channel(reader), has_hub=self._has_hub)

    def helper_cpu_s(self) -> float:
        if self._ask is None:
            return 0.0
        self._ask.send(None)
        cpu_s: float = self._ask.recv()
        return cpu_s

    def close(self) -> None:
        for end in self._parent:
            end.close()
        if self._helper is not None:
            self._helper.join(10)


def direct(context: SpawnContext) -> Ring:
    """Writer to reader; with one reader, the reader itself frees what it has released, in order."""
    return Ring(context, hub=False)


def small(context: SpawnContext) -> Ring:
    """Writer to reader through a ring that stays in the processor's cache."""
    return Ring(context, hub=False, size_bytes=_SMALL_RING_BYTES)


def through_hub(context: SpawnContext) -> Ring:
    """Writer to hub to reader; the hub keeps the table, as in a run."""
    return Ring(context, hub=True)


def _channel(fd: int) -> Channel:
    return Channel(socket.socket(fileno=fd))


class RingProducer:
    """Fills claims straight from the samples' arrays."""

    def __init__(self, segment: Segment, channel: Channel, *, has_hub: bool) -> None:
        self._channel = channel
        self._has_hub = has_hub
        self._writer = RingWriter(
            segment, run=_RUN, schema=_SCHEMA, incarnation=1, head=0, tail=0, sequence=0
        )
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    def send(self, group: Group, form: Form, stamp_ns: int) -> None:
        columns = group.columns
        total = sum(group.lens)
        fields = [Field(column[0].dtype, (total, *column[0].shape[1:])) for column in columns]
        fields.append(Field(group.rewards.dtype, group.rewards.shape))
        head = _HEAD.pack(stamp_ns, *group.lens) + b"\n".join(group.blobs)
        try:
            claim = self._writer.claim(head, fields)
        except RingFull:
            claim = self._wait_for_room(head, fields)
        for column, array in zip(columns, claim.arrays, strict=False):
            np.concatenate(column, out=array)
        claim.arrays[-1][:] = group.rewards
        descriptor = claim.commit()
        if self._has_hub:
            self._pending.append(_COMMIT.pack(*descriptor, self._writer.lowest_open))
        else:
            self._pending.append(_HANDOUT.pack(*descriptor))
        self._pending_bytes += descriptor.length
        if len(self._pending) >= _BATCH or self._pending_bytes >= _BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._pending:
            self._channel.send(b"".join(self._pending))
            self._pending.clear()
            self._pending_bytes = 0

    def _wait_for_room(self, head: bytes, fields: list[Field]) -> Any:
        self.flush()
        while True:
            self._take(self._channel.receive(60))
            for payload in self._channel.read_ready():
                self._take(payload)
            try:
                return self._writer.claim(head, fields)
            except RingFull:
                continue

    def _take(self, payload: bytes) -> None:
        self._writer.set_tail(_NUMBER.unpack(payload)[0])

    def close(self) -> None:
        self._channel.close()


class RingConsumer:
    """Opens records, makes tensors, and gives each record back when its last tensor is gone."""

    def __init__(self, segment: Segment, channel: Channel, *, has_hub: bool) -> None:
        self._channel = channel
        self._has_hub = has_hub
        self._reader = RingReader(segment, run=_RUN, schema=_SCHEMA)
        self._handed: deque[tuple[int, ...]] = deque()
        self._ends: deque[tuple[int, int]] = deque()
        """(sequence, end) of what was opened and is not known to be free, in order."""
        self._free: set[int] = set()
        self._released: deque[int] = deque()
        self._record: Record | None = None

    def receive(self, form: Form) -> Received:
        if not self._handed:
            self._handed.extend(_HANDOUT.iter_unpack(self._channel.receive(60)))
        descriptor = Descriptor._make(self._handed.popleft())
        record = self._reader.open(descriptor)
        record.on_release(self._released.append)
        self._record = record
        if not self._has_hub:
            self._ends.append((descriptor.sequence, descriptor.position + descriptor.length))
        stamp_ns, *lens = _HEAD.unpack_from(record.head)
        tensors = [torch.from_numpy(array) for array in record.arrays[:-1]]
        if form is Form.PER_SAMPLE:
            # Without a gradient this is `split`, at half its cost.
            tensors = [part for tensor in tensors for part in tensor.unsafe_split_with_sizes(lens)]
        return Received(stamp_ns, tensors)

    def done(self) -> None:
        if self._record is not None:
            self._record.close()
            self._record = None
        if len(self._released) >= _BATCH or not self._handed:
            self._report()

    def _report(self) -> None:
        released = [self._released.popleft() for _ in range(len(self._released))]
        if self._has_hub:
            self._tell(b"".join(map(_NUMBER.pack, released)))
            return
        self._free.update(released)
        tail = 0
        while self._ends and self._ends[0][0] in self._free:
            sequence, tail = self._ends.popleft()
            self._free.remove(sequence)
        if tail:
            self._tell(_NUMBER.pack(tail))

    def _tell(self, payload: bytes) -> None:
        """Without waiting: the other side reads when it needs room; `receive` sends what stays in line."""
        self._channel.queue(payload)
        self._channel.flush()

    def close(self) -> None:
        self._channel.close()


def run_hub(ends: Passed, ask: Connection) -> None:
    """The table in a process of its own: commits in, hand-overs out, releases in, tail out."""
    table = RingTable(_RING_BYTES)
    table.restart()
    writer, reader = map(_channel, ends.fds)
    told = 0

    def from_writer() -> None:
        for payload in writer.read_ready():
            handouts = []
            for *numbers, lowest_open in _COMMIT.iter_unpack(payload):
                descriptor = Descriptor._make(numbers)
                table.admit(descriptor, lowest_open)
                table.lease(descriptor.sequence, 0)
                table.retire(descriptor.sequence)
                handouts.append(_HANDOUT.pack(*numbers))
            reader.queue(b"".join(handouts))
        reader.flush()

    def from_reader() -> None:
        nonlocal told
        for payload in reader.read_ready():
            for (sequence,) in _NUMBER.iter_unpack(payload):
                table.release(sequence, 0)
        if table.tail != told:
            told = table.tail
            writer.queue(_NUMBER.pack(told))
            writer.flush()

    def from_parent() -> None:
        ask.recv()
        ask.send(time.process_time())

    selector = selectors.DefaultSelector()
    handlers: list[tuple[Any, Callable[[], None]]] = [
        (writer, from_writer),
        (reader, from_reader),
        (ask, from_parent),
    ]
    for source, handler in handlers:
        selector.register(source, selectors.EVENT_READ, handler)
    try:
        while True:
            for key, _ in selector.select():
                key.data()
    except (ChannelClosed, EOFError):
        return
