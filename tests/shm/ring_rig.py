"""A ring with its three roles, the hub's in the test itself, the others here or in processes of their own."""

import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import ring_actors

from shm import Descriptor, RingTable
from shm.channels.channel import Channel
from shm.ring.segment import Segment

_SCRIPT = str(Path(__file__).with_name("ring_actors.py"))


class Local:
    """An actor in this process."""

    def __init__(self, role: str, segment: Segment) -> None:
        self._segment = Segment.attach(os.dup(segment.fd), writable=role == "writer")
        self._actor = ring_actors.ROLES[role](self._segment)

    def ask(self, name: str, *args: Any, **options: Any) -> Any:
        return ring_actors.result(
            ring_actors.answer(self._actor, ring_actors.pickle.dumps((name, args, options)))
        )

    def close(self) -> None:
        self._segment.close()


class Remote:
    """An actor in a process of its own."""

    def __init__(self, role: str, segment: Segment, kill: tuple[str, str, int] | None = None) -> None:
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), segment.fd)
        extra = [str(part) for part in kill or ()]
        root = Path(__file__).parents[2]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, _SCRIPT, role, *map(str, fds), *extra],
                pass_fds=fds,
                env={**os.environ, "PYTHONPATH": str(root)},
            )
        self.channel = Channel(ours)
        assert self.channel.receive(30) == b"ready"

    def ask(self, name: str, *args: Any, **options: Any) -> Any:
        self.channel.send(ring_actors.pickle.dumps((name, args, options)))
        return ring_actors.result(self.channel.receive(30))

    def close(self) -> None:
        self.channel.close()
        self.process.wait(30)


class Rig:
    """One writer, some readers, and the hub's table; with the few steps that connect them."""

    def __init__(
        self,
        kind: type[Local] | type[Remote],
        size_bytes: int,
        num_readers: int = 2,
        *,
        poison: bool = False,
        checksum_payload: bool = False,
    ) -> None:
        self.segment = Segment.create(size_bytes)
        self.table = RingTable(size_bytes, on_free=self._poison if poison else None)
        self.checksum_payload = checksum_payload
        self.kind = kind
        self._numbers = itertools.count()
        self.writer = kind("writer", self.segment)
        self.readers = [kind("reader", self.segment) for _ in range(num_readers)]
        self.start_writer()

    def _poison(self, position: int, length: int) -> None:
        start = position % self.segment.size_bytes
        self.segment.array[start : start + length] = 0xDB

    def number(self) -> int:
        """A number that no claim, record or view of this rig has."""
        return next(self._numbers)

    def start_writer(self) -> None:
        """Begin the next life of the writer."""
        head, sequence = self.table.restart()
        self.writer.ask(
            "start",
            incarnation=self.table.incarnation,
            head=head,
            tail=self.table.tail,
            sequence=sequence,
            checksum_payload=self.checksum_payload,
        )

    def claim(self, *arrays: np.ndarray, head: bytes = b"") -> int:
        """An open claim, filled; its number."""
        number = self.number()
        self.writer.ask("claim", number, head, list(arrays))
        return number

    def commit(self, claim: int) -> Descriptor:
        """Commit and admit."""
        descriptor, lowest_open = self.writer.ask("commit", claim)
        self.table.admit(descriptor, lowest_open)
        return descriptor

    def write(self, *arrays: np.ndarray, head: bytes = b"") -> Descriptor:
        """A record, admitted."""
        return self.commit(self.claim(*arrays, head=head))

    def open(
        self, descriptor: Descriptor, reader: int = 0, *, copy: bool = False
    ) -> tuple[int, list[np.ndarray]]:
        """Lease a record to a reader and open it there: (its number, what it shows)."""
        self.table.lease(descriptor.sequence, reader)
        number = self.number()
        _, arrays = self.readers[reader].ask("open", number, descriptor, copy=copy)
        return number, arrays

    def collect(self) -> list[tuple[int, int]]:
        """Take in the releases of all readers and tell the writer the tail: (reader, sequence) of each."""
        ended = [(index, s) for index, reader in enumerate(self.readers) for s in reader.ask("released")]
        for reader, sequence in ended:
            self.table.release(sequence, reader)
        self.tell_tail()
        return ended

    def retire(self, descriptor: Descriptor) -> None:
        """Nobody will lease it again."""
        self.table.retire(descriptor.sequence)
        self.tell_tail()

    def tell_tail(self) -> None:
        """Tell the writer how far the ring is free."""
        self.writer.ask("tail", self.table.tail)

    def __enter__(self) -> "Rig":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for actor in (self.writer, *self.readers):
            actor.close()
        self.segment.close()
