"""A writer, a hub and some readers that pass a long stream of records, as fast as they can, payloads checked.

Run as a script: `hub NUM_RECORDS NUM_READERS` starts the others and prints its counts as JSON. Each record
is leased by two readers; each checks content against the sequence number, and releases some records late and
out of order. Messages are packed u64: the writer sends (descriptor, lowest open) and gets the tail; a reader
gets descriptors and sends sequences that it released, or in the end (all ones, number read).
"""

import contextlib
import json
import select
import socket
import subprocess
import sys
from collections import deque
from struct import pack, unpack

import numpy as np
from ring_actors import RUN, SCHEMA
from sync_points import adopt

from shm import Descriptor, Field, Record, RingReader, RingTable, RingWriter
from shm.channels.channel import Channel
from shm.errors import ChannelClosed, RingFull
from shm.ring.segment import Segment

_RING_BYTES = 1 << 20
_END = (1 << 64) - 1
_SIZES = np.random.default_rng(0).integers(0, 1000, 997)


def write(channel: Channel, segment: Segment, num_records: int) -> None:
    """Write the stream; every seventh claim is aborted, some are open together."""
    writer = RingWriter(
        segment, run=RUN, schema=SCHEMA, incarnation=1, head=0, tail=0, sequence=0, checksum_payload=True
    )
    for sequence in range(num_records):
        size = int(_SIZES[sequence % 997])
        fields = [Field("<i8", (size,)), Field(np.uint8, (sequence % 5, 3))]
        while True:
            for payload in channel.read_ready():
                writer.set_tail(*unpack("<Q", payload))
            try:
                extra = writer.claim(b"", [Field(np.uint8, (500,))]) if sequence % 7 == 0 else None
                claim = writer.claim(str(sequence).encode(), fields)
                break
            except RingFull:
                if extra is not None:
                    extra.abort()
                select.select([channel], [], [])
        claim.arrays[0][:] = sequence
        claim.arrays[1][:] = sequence % 251
        if extra is not None:
            extra.abort()
        channel.send(pack("<5Q", *claim.commit(), writer.lowest_open))
    while True:
        channel.receive(60)  # tails, until the hub closes


def read(channel: Channel, segment: Segment) -> None:
    """Read what is handed over, holding a few records back."""
    reader = RingReader(segment, run=RUN, schema=SCHEMA)
    released: deque[int] = deque()
    held: list[Record] = []
    num_read = 0
    while (descriptor := Descriptor(*unpack("<4Q", channel.receive(60)))).sequence != _END:
        record = reader.open(descriptor)
        record.on_release(released.append)
        first, second = record.arrays
        assert record.head == str(record.sequence).encode()
        assert first.size == _SIZES[record.sequence % 997]
        assert (first == record.sequence).all()
        assert (second == record.sequence % 251).all()
        del first, second
        num_read += 1
        held.append(record)
        if num_read % 3:
            held.pop(num_read % len(held)).close()
        if len(held) > 8:  # fewer than the ring has room for: what is held pins it
            held.clear()
        del record
        if released:
            channel.send(pack(f"<{len(released)}Q", *released))
            released.clear()
    held.clear()
    channel.send(pack(f"<{len(released)}Q", *released))
    channel.send(pack("<2Q", _END, num_read))
    channel.receive(60)  # until the hub closes


class Hub:
    """Admits, leases each record to two readers, retires it at once, tells the tail."""

    def __init__(self, num_records: int, num_readers: int) -> None:
        self.table = RingTable(_RING_BYTES)
        self.table.restart()
        self._num_records = num_records
        self._segment = Segment.create(_RING_BYTES)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._writer = self._start("writer", str(num_records))
        self._readers = [self._start("reader") for _ in range(num_readers)]
        self.num_read = 0

    def _start(self, role: str, *extra: str) -> Channel:
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), self._segment.fd)
        with theirs:
            command = [sys.executable, __file__, role, *map(str, fds), *extra]
            self._processes.append(subprocess.Popen(command, pass_fds=fds))
        return Channel(ours)

    def run(self) -> None:
        num_admitted, told, finished = 0, 0, 0
        while finished < len(self._readers):
            ends = [self._writer, *self._readers]
            select.select(ends, [end for end in ends if end.wants_write], [])
            for payload in self._writer.read_ready():
                *descriptor, lowest_open = unpack("<5Q", payload)
                self._hand_over(Descriptor(*descriptor), lowest_open)
                num_admitted += 1
                if num_admitted == self._num_records:
                    for reader in self._readers:
                        reader.queue(pack("<4Q", 0, _END, 0, 0))
            for number, reader in enumerate(self._readers):
                finished += sum(self._released(number, payload) for payload in reader.read_ready())
            if self.table.tail != told:
                told = self.table.tail
                self._writer.queue(pack("<Q", told))
            for end in ends:
                end.flush()
        for end in ends:
            end.close()
        assert all(process.wait() == 0 for process in self._processes)

    def _hand_over(self, descriptor: Descriptor, lowest_open: int) -> None:
        self.table.admit(descriptor, lowest_open)
        for step in (0, 1 + descriptor.sequence % (len(self._readers) - 1)):
            number = (descriptor.sequence + step) % len(self._readers)
            self.table.lease(descriptor.sequence, number)
            self._readers[number].queue(pack("<4Q", *descriptor))
        self.table.retire(descriptor.sequence)

    def _released(self, number: int, payload: bytes) -> bool:
        numbers = unpack(f"<{len(payload) // 8}Q", payload)
        if numbers and numbers[0] == _END:
            self.num_read += numbers[1]
            return True
        for sequence in numbers:
            self.table.release(sequence, number)
        return False


def main() -> None:
    role, *arguments = sys.argv[1:]
    if role == "hub":
        hub = Hub(*map(int, arguments))
        hub.run()
        figures = hub.table.statistics()
        names = ("num_admitted", "num_freed", "num_refused", "num_live", "num_leases")
        counts = {name: getattr(figures, name) for name in names}
        print(json.dumps(counts | {"num_read": hub.num_read, "num_laps": figures.head // _RING_BYTES}))
        return
    with Channel(adopt(int(arguments[0]))) as channel:
        segment = Segment.attach(int(arguments[1]), writable=role == "writer")
        with contextlib.suppress(ChannelClosed):
            if role == "reader":
                read(channel, segment)
            else:
                write(channel, segment, int(arguments[2]))


if __name__ == "__main__":
    main()
