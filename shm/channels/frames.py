"""Cutting a stream of bytes into messages, and putting messages in line for it. No I/O.

A frame is the four bytes "FaC1", the payload's length as u32, the payload. The four bytes end a conversation
with anything that speaks another protocol at its first word, before its length is believed.
Invariant: a frame once begun is sent whole before any other; urgent frames overtake all that are not begun.
"""

import os
import struct
from collections import deque
from collections.abc import Sequence
from itertools import chain, islice

from shm.errors import ChannelError, MessageTooLarge

FRAME = struct.Struct("<4sI")
MAGIC = b"FaC1"
MAX_MESSAGE_BYTES = 64 << 20
_MAX_BATCH = 64
"""Frames in one system call."""


class FrameOutbox:
    """Frames that wait for room in the socket."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._begun: memoryview | None = None
        """Rest of a frame whose first bytes are gone."""
        self._urgent: deque[bytes] = deque()
        self._normal: deque[bytes] = deque()
        self._fds: dict[int, list[int]] = {}
        """id of a frame -> duplicates of the descriptors that travel with its first byte."""
        self.num_bytes = 0
        """Bytes that wait."""

    def __len__(self) -> int:
        return len(self._urgent) + len(self._normal) + (self._begun is not None)

    def add(self, payload: bytes, *, urgent: bool, fds: Sequence[int]) -> None:
        """Put a message in line.

        Raises:
            MessageTooLarge: it is beyond the limit.
        """
        if len(payload) > self._max_message_bytes:
            raise MessageTooLarge(
                f"a message may have {self._max_message_bytes:,} bytes, found {len(payload):,}: large data "
                "travel in records of the ring or in files"
            )
        frame = FRAME.pack(MAGIC, len(payload)) + payload
        if fds:
            self._fds[id(frame)] = _duplicates(fds)
        (self._urgent if urgent else self._normal).append(frame)
        self.num_bytes += len(frame)

    def batch(self) -> tuple[list[bytes | memoryview], list[int]]:
        """What to send next: buffers for one system call, and the descriptors that go with them."""
        if self._begun is not None:
            return [self._begun], []
        frames: list[bytes | memoryview] = []
        for frame in islice(chain(self._urgent, self._normal), _MAX_BATCH):
            if id(frame) in self._fds:
                return (frames, []) if frames else ([frame], self._fds[id(frame)])
            frames.append(frame)
        return frames, []

    def sent(self, num_bytes: int) -> int:
        """Take sent bytes out of the line; returns how many frames they completed."""
        self.num_bytes -= num_bytes
        num_frames = 0
        if self._begun is not None:
            if num_bytes < len(self._begun):
                self._begun = self._begun[num_bytes:]
                return 0
            num_bytes -= len(self._begun)
            self._begun = None
            num_frames = 1
        while num_bytes:
            frame = (self._urgent or self._normal).popleft()
            self._close_fds(frame)
            if num_bytes < len(frame):
                self._begun = memoryview(frame)[num_bytes:]
                return num_frames
            num_bytes -= len(frame)
            num_frames += 1
        return num_frames

    def clear(self) -> None:
        """Forget all that waits."""
        for fds in self._fds.values():
            for fd in fds:
                os.close(fd)
        self._fds.clear()
        self._urgent.clear()
        self._normal.clear()
        self._begun = None
        self.num_bytes = 0

    def _close_fds(self, frame: bytes) -> None:
        for fd in self._fds.pop(id(frame), ()):
            os.close(fd)


def _duplicates(fds: Sequence[int]) -> list[int]:
    """Descriptors of our own, so that the sender may close its ones at once."""
    own: list[int] = []
    try:
        own.extend(os.dup(fd) for fd in fds)
    except OSError as error:
        for fd in own:
            os.close(fd)
        raise ChannelError(
            f"descriptors must be open and within the limit of open files (ulimit -n) to be passed: {error}"
        ) from error
    return own


class Inbox:
    """Messages cut out of what the socket gave."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._rest = bytearray()
        """Bytes of a frame that is not whole yet."""
        self.messages: deque[bytes] = deque()

    @property
    def num_rest_bytes(self) -> int:
        """Bytes of a message that has begun and is not whole."""
        return len(self._rest)

    def feed(self, data: memoryview) -> int:
        """Add bytes; returns how many messages they completed.

        Raises:
            ChannelError: they are not of this protocol; whole messages before them are kept.
        """
        rest, start, count = self._rest, 0, 0
        rest += data
        end = len(rest)
        try:
            while end - start >= FRAME.size:
                magic, length = FRAME.unpack_from(rest, start)
                self._check(magic, length)
                stop = start + FRAME.size + length
                if stop > end:
                    break
                self.messages.append(bytes(rest[start + FRAME.size : stop]))
                start, count = stop, count + 1
        finally:
            if start:
                del rest[:start]
        return count

    def _check(self, magic: bytes, length: int) -> None:
        if magic != MAGIC:
            raise ChannelError(
                f"a message begins with {MAGIC!r}, found {magic!r}: the peer is no part of fa_rollout, "
                "or of another release; its bytes are not read"
            )
        if length > self._max_message_bytes:
            raise MessageTooLarge(
                f"a message may have {self._max_message_bytes:,} bytes, the peer announces {length:,}: "
                "it is refused"
            )
