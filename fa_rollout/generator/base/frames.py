"""Frames of a log in reused memory: allocating new pages costs more than encoding.

In: values. Out: chunks of whole frames, to be written and then returned. Invariant: a frame is in one chunk.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from fa_rollout.records.sample_file import LENGTH

CHUNK_BYTES = 1 << 20
_MAX_SPARE = 4


@dataclass(slots=True, eq=False)
class Chunk:
    """A buffer of whole frames."""

    data: bytearray
    end: int = 0

    @property
    def frames(self) -> memoryview:
        return memoryview(self.data)[: self.end]


@dataclass(slots=True, eq=False)
class Frames:
    """Frames that are not written yet."""

    encoder: msgspec.msgpack.Encoder
    num_bytes: int = 0
    _chunks: list[Chunk] = field(default_factory=list)
    _spare: list[Chunk] = field(default_factory=list)
    _scratch: bytearray = field(default_factory=bytearray)

    def add(self, value: Any) -> None:
        """Append a frame.

        Raises:
            TypeError, ValueError, OverflowError: the value cannot be encoded; nothing is appended.
        """
        self.encoder.encode_into(value, self._scratch)
        length = LENGTH.size + len(self._scratch)
        if not self._chunks or self._chunks[-1].end + length > len(self._chunks[-1].data):
            self._chunks.append(self._fresh(length))
        chunk = self._chunks[-1]
        LENGTH.pack_into(chunk.data, chunk.end, len(self._scratch))
        chunk.data[chunk.end + LENGTH.size : chunk.end + length] = self._scratch
        chunk.end += length
        self.num_bytes += length

    def take(self) -> list[Chunk]:
        """Remove and return all frames; pass the chunks to `reuse` after writing."""
        chunks, self._chunks, self.num_bytes = self._chunks, [], 0
        return chunks

    def reuse(self, chunks: list[Chunk]) -> None:
        """Keep written chunks for reuse."""
        for chunk in chunks:
            if len(chunk.data) == CHUNK_BYTES and len(self._spare) < _MAX_SPARE:
                chunk.end = 0
                self._spare.append(chunk)

    def _fresh(self, length: int) -> Chunk:
        if length <= CHUNK_BYTES and self._spare:
            return self._spare.pop()
        return Chunk(bytearray(max(CHUNK_BYTES, length)))
