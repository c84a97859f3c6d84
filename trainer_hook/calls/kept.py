"""What a checkpoint keeps of groups that are not trained: finished records, begun samples with their tokens.

In: groups. Out: one block of bytes: a magic word, the length of the index, the index, the data of each group
behind its checksum.
Invariant: what is read back is what was kept, bit for bit; a block that is none of this release is refused,
and nothing of it is used.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from trainer_hook.errors import HookStateError
from trainer_hook.messages import Commit, KeptEntry, KeptKind

_MAGIC = b"FaK2"
_PREFIX = struct.Struct("<4sII")
"""Magic, length of the index, crc32 of the index."""
_CHECKSUM = struct.Struct("<I")
"""crc32 of what follows it."""
_ENCODER = msgspec.msgpack.Encoder()


class KeptArray(msgspec.Struct, frozen=True, array_like=True):
    """An array as bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> "KeptArray":
        return cls(array.dtype.str, array.shape, array.tobytes())

    @property
    def array(self) -> npt.NDArray[Any]:
        """Read-only."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class KeptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record of the ring, and what the hub was told of it."""

    schema: int
    head: bytes
    arrays: list[KeptArray]
    commit: Commit


class KeptSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample so far."""

    member: int
    ids: KeptArray
    logprobs: KeptArray
    spans: list[tuple[int, int]]
    """(version, end)"""
    finish: str | None
    """Why it ended; None: an engine was at it."""
    extras: dict[str, KeptArray] = {}


class KeptPartial(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of a group under way, as far as there are tokens."""

    conditions: str
    """Fingerprint of what they were sampled from: other prompt ids or sampling parameters have no use for
    them."""
    samples: list[KeptSample]


Kept = KeptRecord | KeptPartial


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGroup:
    """One group, encoded."""

    group: int
    kind: KeptKind
    oldest_version: int
    newest_version: int
    data: bytes

    @classmethod
    def of(cls, group: int, kept: Kept) -> "KeptGroup":
        """Encode a group."""
        if isinstance(kept, KeptRecord):
            kind, versions = KeptKind.RECORD, [kept.commit.oldest_version, kept.commit.newest_version]
        else:
            kind = KeptKind.PARTIAL
            versions = [version for sample in kept.samples for version, _ in sample.spans]
        encoded = _ENCODER.encode(kept)
        return cls(
            group=group,
            kind=kind,
            oldest_version=min(versions),
            newest_version=max(versions),
            data=_CHECKSUM.pack(zlib.crc32(encoded)) + encoded,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBlock:
    """Kept groups in one piece."""

    data: bytes
    num_groups: int
    num_left_out: int
    """Groups that did not fit."""


def pack(groups: Iterable[KeptGroup], *, limit_bytes: int) -> KeptBlock:
    """Put groups together, in this order; those whose data does not fit the limit any more are left out."""
    entries: list[KeptEntry] = []
    parts: list[bytes] = []
    num_bytes = num_left_out = 0
    for group in groups:
        if num_bytes + len(group.data) > limit_bytes:
            num_left_out += 1
            continue
        versions = (group.oldest_version, group.newest_version)
        entries.append(KeptEntry(group.group, group.kind, *versions, num_bytes, len(group.data)))
        parts.append(group.data)
        num_bytes += len(group.data)
    index = _ENCODER.encode(entries)
    prefix = _PREFIX.pack(_MAGIC, len(index), zlib.crc32(index))
    return KeptBlock(
        data=b"".join([prefix, index, *parts]), num_groups=len(entries), num_left_out=num_left_out
    )


def index_of(block: bytes) -> list[KeptEntry]:
    """What a block has; offsets count from its start.

    Raises:
        HookStateError: it is no block of this release, or was cut.
    """
    try:
        magic, length, crc = _PREFIX.unpack_from(block)
        index = block[_PREFIX.size : _PREFIX.size + length]
        if magic != _MAGIC or zlib.crc32(index) != crc:
            raise ValueError("another magic word or checksum")
        entries = msgspec.msgpack.decode(index, type=list[KeptEntry])
    except (struct.error, ValueError) as error:
        raise HookStateError(
            f"what a checkpoint kept of unfinished groups must be what this release wrote, found "
            f'{len(block)} bytes that are not ({error}): load the state without its "kept"'
        ) from error
    start = _PREFIX.size + length
    moved = [msgspec.structs.replace(entry, offset=entry.offset + start) for entry in entries]
    if any(entry.offset + entry.length > len(block) for entry in moved):
        raise HookStateError(
            f'the "kept" of a state must be whole, found {len(block)} bytes that end inside a group: '
            "load the state without it"
        )
    return moved


def unpack(block: bytes) -> Iterator[KeptGroup]:
    """The groups of a block, as they are put into another. Raises HookStateError as `index_of` does."""
    for entry in index_of(block):
        yield KeptGroup(
            group=entry.group,
            kind=entry.kind,
            oldest_version=entry.oldest_version,
            newest_version=entry.newest_version,
            data=block[entry.offset : entry.offset + entry.length],
        )


def read(path: str, entry: KeptEntry) -> Kept:
    """One group out of a block in a file.

    Raises:
        OSError, ValueError: the file is gone, or what is there is no kept group.
    """
    with open(path, "rb") as file:
        file.seek(entry.offset)
        checksum, data = file.read(_CHECKSUM.size), file.read(entry.length - _CHECKSUM.size)
    if checksum != _CHECKSUM.pack(zlib.crc32(data)):
        raise ValueError(f"what was kept of group {entry.group} must be as it was written, it has changed")
    if entry.kind is KeptKind.RECORD:
        return msgspec.msgpack.decode(data, type=KeptRecord)
    return msgspec.msgpack.decode(data, type=KeptPartial)
