"""Writer, reader and hub that work on their own as fast as they can, to be killed while they do.

Run as a script: `writer CHANNEL_FD RING_FD STATE [POINT SIDE COUNT]`, `reader CHANNEL_FD RING_FD [POINT SIDE
COUNT]`, or `hub RING_BYTES POINT SIDE COUNT`, which starts the other two.

Messages are a letter and whole numbers: C commit and lowest open claim, H hand-over, D done with a checksum
of what was read, R released, T tail.
"""

import json
import os
import select
import socket
import struct
import subprocess
import sys
import zlib
from collections import deque

import numpy as np
from ring_actors import RUN, SCHEMA, kill_at
from sync_points import adopt

from shm import Descriptor, Field, Record, RingReader, RingTable, RingWriter
from shm.channels.channel import Channel
from shm.errors import ChannelClosed, RingFull
from shm.ring.segment import Segment

_MAX_HANDED = 8


def pack(letter: bytes, *numbers: int) -> bytes:
    """A message."""
    return letter + struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack(payload: bytes) -> tuple[bytes, tuple[int, ...]]:
    """(letter, numbers) of a message."""
    return payload[:1], struct.unpack(f"<{len(payload) // 8}Q", payload[1:])


def content(incarnation: int, sequence: int) -> np.ndarray:
    """What a record holds, made from its name alone."""
    random = np.random.default_rng((incarnation, sequence))
    return random.integers(0, 255, int(random.integers(1, 20_000)), dtype=np.uint8)


class Hub:
    """Commits in, hand-overs out, releases in, tail out."""

    def __init__(self, table: RingTable) -> None:
        self.table = table
        self._ready: deque[Descriptor] = deque()
        self._handed: dict[int, Descriptor] = {}
        self._told = 0
        self.num_admitted = 0
        self.num_checked = 0

    def turn(self, writer: Channel | None, reader: Channel) -> None:
        """Take in what has come, and pass on what follows from it."""
        ends = [end for end in (writer, reader) if end is not None]
        pidfds = [end.peer_pidfd for end in ends if end.peer_pidfd is not None]
        select.select([*ends, *pidfds], [], [], 0.01)
        if writer is not None:
            for payload in writer.read_ready():
                self._commit(*unpack(payload)[1])
        for payload in reader.read_ready():
            self._from_reader(*unpack(payload))
        while self._ready and len(self._handed) < _MAX_HANDED:
            descriptor = self._ready.popleft()
            self._handed[descriptor.sequence] = descriptor
            self.table.lease(descriptor.sequence, "reader")
            reader.queue(pack(b"H", *descriptor))
        if writer is not None and self.table.tail != self._told:
            self._told = self.table.tail
            writer.queue(pack(b"T", self._told))
        for end in ends:
            end.flush()

    def _commit(self, *numbers: int) -> None:
        descriptor = Descriptor(*numbers[:4])
        self.table.admit(descriptor, numbers[4])
        self.num_admitted += 1
        self._ready.append(descriptor)

    def _from_reader(self, letter: bytes, numbers: tuple[int, ...]) -> None:
        if letter == b"D":
            descriptor = self._handed[numbers[0]]
            expected = zlib.crc32(content(descriptor.incarnation, descriptor.sequence).tobytes())
            assert numbers[1] == expected, f"{descriptor} was read wrong"
            self.num_checked += 1
            self.table.retire(descriptor.sequence)
        else:
            self.table.release(numbers[0], "reader")
            del self._handed[numbers[0]]

    def reader_lost(self) -> None:
        """Its leases end; what it had not read is handed over again."""
        held = self.table.release_all("reader")
        again = [self._handed[sequence] for sequence in held if not self._is_done(sequence)]
        self._ready.extendleft(reversed(again))
        self._handed.clear()

    def _is_done(self, sequence: int) -> bool:
        try:
            self.table.lease(sequence, "probe")
        except ValueError:
            return True
        self.table.release(sequence, "probe")
        return False


def write(channel: Channel, segment: Segment, state: dict[str, int]) -> None:
    """Write records for as long as there is a hub; two claims are open at once, the younger ends first."""
    writer = RingWriter(segment, run=RUN, schema=SCHEMA, checksum_payload=True, **state)
    while True:
        for payload in channel.read_ready():
            writer.set_tail(unpack(payload)[1][0])
        sequence = writer.statistics().num_committed + state["sequence"]
        names = [(state["incarnation"], sequence + 1), (state["incarnation"], sequence)]
        claims = []
        try:
            for name in names:
                values = content(*name)
                claims.append(writer.claim(b"head", [Field(np.uint8, values.shape)]))
                claims[-1].arrays[0][:] = values
        except RingFull:
            for claim in claims:
                claim.abort()
            select.select([channel], [], [])
            continue
        for claim in reversed(claims):
            channel.send(pack(b"C", *claim.commit(), writer.lowest_open))


def read(channel: Channel, segment: Segment) -> Record | None:
    """Read records for as long as there is a hub, keeping the latest few; returns one that is still open."""
    reader = RingReader(segment, run=RUN, schema=SCHEMA)
    released: deque[int] = deque()
    held: deque[Record] = deque()
    try:
        while True:
            _, numbers = unpack(channel.receive(60))
            record = reader.open(Descriptor(*numbers))
            record.on_release(released.append)
            held.append(record)
            channel.send(pack(b"D", record.sequence, zlib.crc32(record.arrays[0])))
            if len(held) > 3:
                held.popleft().close()
            while released:
                channel.send(pack(b"R", released.popleft()))
            del record
    except ChannelClosed:
        return held[-1] if held else None


def main() -> None:
    role, *arguments = sys.argv[1:]
    if role == "hub":
        return run_hub(int(arguments[0]), arguments[1:])
    with Channel(adopt(int(arguments[0]))) as channel:
        segment = Segment.attach(int(arguments[1]), writable=role == "writer")
        kill = arguments[-3:]
        if role == "writer":
            if len(arguments) > 3:
                kill_at(kill[0], kill[1], int(kill[2]))
            try:
                write(channel, segment, json.loads(arguments[2]))
            except ChannelClosed:
                sys.stdout.write("writer-saw-it\n")
            return None
        if len(arguments) > 2:
            kill_at(kill[0], kill[1], int(kill[2]))
        last = read(channel, segment)
        segment.close()
        sys.stdout.write("reader-saw-it\n")
        if last is None or last.arrays[0].size:
            sys.stdout.write("views-intact\n")
    return None


def run_hub(ring_bytes: int, kill: list[str]) -> None:
    """Be a whole hub, until killed."""
    segment, table = Segment.create(ring_bytes), RingTable(ring_bytes)
    head, sequence = table.restart()
    state = {"incarnation": table.incarnation, "head": head, "tail": 0, "sequence": sequence}
    channels = []
    for role, *extra in (("writer", json.dumps(state)), ("reader",)):
        ours, theirs = socket.socketpair()
        with theirs:
            fds = (theirs.fileno(), segment.fd)
            subprocess.Popen([sys.executable, __file__, role, *map(str, fds), *extra], pass_fds=fds)
        channels.append(Channel(ours))
    hub = Hub(table)
    while hub.num_checked < 10:
        hub.turn(*channels)
    kill_at(kill[0], kill[1], int(kill[2]))
    while True:
        hub.turn(*channels)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    main()
