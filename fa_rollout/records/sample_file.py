"""The bytes of a sample log: one frame a group, appended by the generator, read by anyone at any time.

    file    := "fa_rollout samples 1\n" frame*
    frame   := length (4 bytes, little endian), payload of so many bytes
    payload := msgpack of a `WrittenGroup`

Invariant: a file that ends in the middle of a frame, since its writer was killed or the disk was full, is
whole up to that frame.

P prompt tokens, R response tokens.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

MAGIC = b"fa_rollout samples 1\n"
LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30
FOLDER = "samples"
COMMITTED = "committed"
"""Outcome of a group that went to the hub; the others are filtered, failed, dropped."""
_NAME = re.compile(r"(?P<run>.+)\.(?P<incarnation>[0-9]{4,})\.(?P<number>[0-9]{5,})\.msgpack")


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens up to `end` were sampled by `version`; written from `sample.VersionSpan` as it is."""

    version: int
    end: int


class WrittenGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt at a group, and its end. The lists run over its samples."""

    group: int
    attempt: int
    epoch: int
    prompt_index: int
    """Row of the data."""
    outcome: str
    reason: str = ""
    started_s: float
    ended_s: float
    """time.monotonic() of the host, as in the event log."""
    label: Any = None
    prompt_ids: bytes = b""
    """[P] int32, of the group; empty where none could be made."""
    own_prompt_ids: list[bytes] = []
    """[P] int32 of each sample, where user code changed one."""
    members: list[int] = []
    response_lens: list[int] = []
    response_ids: bytes = b""
    """[sum of R] int32, one sample after the other."""
    loss_mask: bytes = b""
    """[sum of R] bytes 0 or 1; empty where all tokens are trained."""
    version_spans: list[list[Span]] = []
    rewards: list[float | None] = []
    reward_parts: list[dict[str, float]] = []
    finish_reasons: list[str | None] = []


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class FileName:
    """Of one file: which life of which run's generator wrote it, and its number in that life."""

    run: str
    incarnation: int
    number: int

    def __str__(self) -> str:
        return f"{self.run}.{self.incarnation:04d}.{self.number:05d}.msgpack"

    @classmethod
    def parse(cls, name: str) -> "FileName | None":
        """None for a file that is none of ours."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        return cls(run=found["run"], incarnation=int(found["incarnation"]), number=int(found["number"]))


def files_of(output: Path) -> dict[FileName, Path]:
    """All sample files in a run's output folder, in the order of their writing within each run."""
    found = {FileName.parse(path.name): path for path in (output / FOLDER).glob("*.msgpack")}
    return {name: found[name] for name in sorted(name for name in found if name is not None)}


def read(path: Path) -> Iterator[WrittenGroup]:
    """Groups of a file that may still be written to, up to its last whole frame."""
    decoder = msgspec.msgpack.Decoder(WrittenGroup)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return  # the oldest one goes when the log is full
    with file:
        if file.read(len(MAGIC)) != MAGIC:
            return
        while len(head := file.read(LENGTH.size)) == LENGTH.size:
            (length,) = LENGTH.unpack(head)
            payload = file.read(length) if 0 < length <= MAX_FRAME_BYTES else b""
            if len(payload) != length or not payload:
                return
            try:
                yield decoder.decode(payload)
            except msgspec.DecodeError:
                continue  # user code had put something else into a sample that was refused
