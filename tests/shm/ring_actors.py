"""Writer and reader of a ring as objects that take requests, in the test's process or in one of their own.

Run as a script: `ring_actors.py ROLE CHANNEL_FD RING_FD [POINT SIDE COUNT]`. With a sync point named, the
process kills itself by SIGKILL just before or after the line at that mark, on its COUNT-th passage.
"""

import os
import pickle
import signal
import sys
from collections import deque
from types import FrameType
from typing import Any

import numpy as np
import sync_points

from shm import Claim, Descriptor, Field, Record, RingReader, RingWriter, errors
from shm.channels.channel import Channel
from shm.errors import ChannelClosed, FaRolloutError
from shm.ring.segment import Segment

RUN, SCHEMA = 0xFEED, 0xBEEF


class WriterActor:
    """A `RingWriter` with claims that are known by a number."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._writer: RingWriter
        self._claims: dict[int, Claim] = {}

    def start(self, **state: Any) -> None:
        self._writer = RingWriter(self._segment, run=RUN, schema=SCHEMA, **state)
        self._claims.clear()

    def claim(self, number: int, head: bytes, arrays: list[np.ndarray]) -> None:
        claim = self._writer.claim(head, [Field(a.dtype, a.shape) for a in arrays])
        for view, values in zip(claim.arrays, arrays, strict=True):
            view[...] = values
        self._claims[number] = claim

    def commit(self, number: int) -> tuple[Descriptor, int]:
        return self._claims.pop(number).commit(), self._writer.lowest_open

    def abort(self, number: int) -> int:
        self._claims.pop(number).abort()
        return self._writer.lowest_open

    def tail(self, position: int) -> None:
        self._writer.set_tail(position)

    def figures(self) -> Any:
        return self._writer.statistics()

    def max_record_bytes(self) -> int:
        return self._writer.max_record_bytes

    def pid(self) -> int:
        return os.getpid()


class ReaderActor:
    """A `RingReader` with records and views that are known by a number."""

    def __init__(self, segment: Segment) -> None:
        self._reader = RingReader(segment, run=RUN, schema=SCHEMA)
        self._records: dict[int, Record] = {}
        self._views: dict[int, np.ndarray] = {}
        self._released: deque[int] = deque()

    def open(
        self, number: int, descriptor: Descriptor, *, copy: bool = False
    ) -> tuple[bytes, list[np.ndarray]]:
        record = self._reader.open(descriptor, copy=copy)
        record.on_release(self._released.append)
        self._records[number] = record
        return record.head, [array.copy() for array in record.arrays]

    def read(self, number: int) -> list[np.ndarray]:
        return [array.copy() for array in self._records[number].arrays]

    def clone(self, number: int, other: int) -> None:
        self._records[other] = self._records[number].clone()

    def is_held(self, number: int) -> bool:
        return self._records[number].is_held()

    def close(self, number: int) -> None:
        self._records.pop(number).close()

    def keep_view(self, number: int, column: int) -> None:
        self._views[number] = self._records[number].arrays[column][1:].reshape(-1)[::2]

    def read_view(self, number: int) -> np.ndarray:
        return self._views[number].copy()

    def drop_view(self, number: int) -> None:
        del self._views[number]

    def released(self) -> list[int]:
        released = list(self._released)
        self._released.clear()
        return released

    def figures(self) -> Any:
        return self._reader.statistics()

    def pid(self) -> int:
        return os.getpid()


ROLES = {"writer": WriterActor, "reader": ReaderActor}


def answer(actor: Any, request: bytes) -> bytes:
    """Do what a request asks; an error of the project goes back by name."""
    name, args, options = pickle.loads(request)
    try:
        return pickle.dumps((True, getattr(actor, name)(*args, **options)))
    except FaRolloutError as error:
        return pickle.dumps((False, (type(error).__name__, str(error))))


def result(reply: bytes) -> Any:
    """The value of a reply, or its error raised."""
    succeeded, value = pickle.loads(reply)
    if not succeeded:
        raise getattr(errors, value[0])(value[1])
    return value


def kill_at(point: str, side: str, count: int) -> None:
    """Kill this process before or after the line at a sync point runs for the `count`-th time."""
    place = sync_points.find(point)
    passages = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal passages
        if frame.f_code.co_filename != place.path:
            return None
        if passages == count:  # the line has run: this is the event that follows it
            os.kill(os.getpid(), signal.SIGKILL)
        if event == "line" and frame.f_lineno == place.line:
            passages += 1
            if passages == count and side == "before":
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def main() -> None:
    role, channel_fd, ring_fd, *kill = sys.argv[1:]
    with Channel(sync_points.adopt(int(channel_fd))) as channel:
        actor = ROLES[role](Segment.attach(int(ring_fd), writable=role == "writer"))
        channel.send(b"ready")
        if kill:
            kill_at(kill[0], kill[1], int(kill[2]))
        while True:
            try:
                request = channel.receive(60)
            except ChannelClosed:
                return
            channel.send(answer(actor, request))


if __name__ == "__main__":
    main()
