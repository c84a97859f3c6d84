"""Groups that are not trained yet, stored in a checkpoint: finished records, and tokens of running samples.

In: groups. Out: one block of bytes: a magic word, the length of the index, the index, then the data of each
group after its checksum.
Invariant: groups are read back bit for bit; a block of another release is refused as a whole.
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
    """A record of the ring, with its `Commit`."""

    schema: int
    head: bytes
    arrays: list[KeptArray]
    commit: Commit


class KeptSample(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of an unfinished sample."""

    member: int
    ids: KeptArray
    logprobs: KeptArray
    spans: list[tuple[int, int]]
    """(version, end)"""
    finish: str | None
    """Finish reason; None: it was still running."""
    extras: dict[str, KeptArray] = {}


class KeptPartial(msgspec.Struct, frozen=True, kw_only=True):
    """The samples with tokens of an unfinished group."""

    conditions: str
    """Fingerprint of prompt ids and sampling parameters; the samples are used only if it matches."""
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
    """Groups packed into one block."""

    data: bytes
    num_groups: int
    num_left_out: int
    """Number of groups over the limit."""


def pack(groups: Iterable[KeptGroup], *, limit_bytes: int) -> KeptBlock:
    """Pack groups in this order; leave out groups that exceed the limit."""
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
    """The entries of a block; offsets count from its start.

    Raises:
        HookStateError: the block is from another release, or truncated.
    """
    try:
        magic, length, crc = _PREFIX.unpack_from(block)
        index = block[_PREFIX.size : _PREFIX.size + length]
        if magic != _MAGIC or zlib.crc32(index) != crc:
            raise ValueError("wrong magic word or checksum")
        entries = msgspec.msgpack.decode(index, type=list[KeptEntry])
    except (struct.error, ValueError) as error:
        raise HookStateError(
            f"unfinished groups in a checkpoint must be in this release's format, found "
            f'{len(block)} bytes of another ({error}): remove "kept" from the state and load it again'
        ) from error
    start = _PREFIX.size + length
    moved = [msgspec.structs.replace(entry, offset=entry.offset + start) for entry in entries]
    if any(entry.offset + entry.length > len(block) for entry in moved):
        raise HookStateError(
            f'"kept" of a state must be complete, found {len(block)} bytes that end inside a group: '
            'remove "kept" from the state and load it again'
        )
    return moved


def unpack(block: bytes) -> Iterator[KeptGroup]:
    """The groups of a block, ready to be packed again. Raises HookStateError like `index_of`."""
    for entry in index_of(block):
        yield KeptGroup(
            group=entry.group,
            kind=entry.kind,
            oldest_version=entry.oldest_version,
            newest_version=entry.newest_version,
            data=block[entry.offset : entry.offset + entry.length],
        )


def read(path: str, entry: KeptEntry) -> Kept:
    """Read one group from a block in a file.

    Raises:
        OSError, ValueError: the file is missing or damaged.
    """
    with open(path, "rb") as file:
        file.seek(entry.offset)
        checksum, data = file.read(_CHECKSUM.size), file.read(entry.length - _CHECKSUM.size)
    if checksum != _CHECKSUM.pack(zlib.crc32(data)):
        raise ValueError(f"stored data of group {entry.group} must match its checksum, the file was changed")
    if entry.kind is KeptKind.RECORD:
        return msgspec.msgpack.decode(data, type=KeptRecord)
    return msgspec.msgpack.decode(data, type=KeptPartial)
