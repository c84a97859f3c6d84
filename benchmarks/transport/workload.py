"""What every contender carries: groups of samples as a generator has them, and what a trainer does with them.

A group is 8 samples; a sample has token ids, log-probs and a loss mask of T tokens, a blob of JSON, and with
routed experts 48 layers of 8 choices a token.
"""

import json
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shm.ring.segment import Segment

NUM_SAMPLES = 8
_POOL = 6
"""Different groups in turn, so that the source is not always in the caches."""
Column = list[npt.NDArray[Any]]


class Form(StrEnum):
    """How a group reaches the trainer."""

    PER_SAMPLE = "per sample"
    """24 or 32 tensors, 16 sums: the same for all."""
    PACKED = "packed"
    """3 or 4 tensors of the whole group, 2 sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One message size."""

    name: str
    num_tokens: int
    """Of a sample."""
    routing: int = 0
    """Bytes of routed experts a token."""

    @property
    def num_bytes(self) -> int:
        """Of a group's arrays."""
        return NUM_SAMPLES * self.num_tokens * (9 + self.routing)


SIZES = (
    Size(name="38 KB", num_tokens=512),
    Size(name="297 KB", num_tokens=4096),
    Size(name="2.4 MB", num_tokens=32768),
    Size(name="12.9 MB", num_tokens=4096, routing=384),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What a generator holds when a group is finished."""

    columns: list[Column]
    """Per column one array a sample: tokens, log-probs, mask and perhaps routing."""
    blobs: list[bytes]
    rewards: npt.NDArray[np.float32]
    lens: tuple[int, ...]

    @property
    def arrays(self) -> Column:
        """All arrays, sample by sample, column by column."""
        return [array for column in self.columns for array in column]

    def packed(self) -> Column:
        """One new array a column."""
        return [np.concatenate(column) for column in self.columns]


def make_groups(size: Size) -> list[Group]:
    """Groups of one size; lengths differ a little, as they do."""
    random = np.random.default_rng(0)
    return [_make_group(size, random) for _ in range(_POOL)]


def _make_group(size: Size, random: np.random.Generator) -> Group:
    spread = random.integers(-size.num_tokens // 8, size.num_tokens // 8, NUM_SAMPLES // 2)
    lens = tuple(int(size.num_tokens + d) for d in np.concatenate([spread, -spread]))
    columns: list[Column] = [
        [random.integers(0, 150_000, n, dtype=np.int32) for n in lens],
        [-random.random(n, dtype=np.float32) for n in lens],
        [np.ones(n, np.uint8) for n in lens],
    ]
    if size.routing:
        columns.append([random.integers(0, 128, (n, size.routing // 8, 8), dtype=np.uint8) for n in lens])
    blobs = [
        json.dumps({"member": m, "finish": "stop", "latency_s": 1.25}).encode() for m in range(NUM_SAMPLES)
    ]
    return Group(
        columns=columns, blobs=blobs, rewards=random.random(NUM_SAMPLES, dtype=np.float32), lens=lens
    )


def touch(form: Form, tensors: list[torch.Tensor]) -> None:
    """Read what a trainer reads first: token ids and log-probs."""
    num_sums = 2 if form is Form.PACKED else 2 * NUM_SAMPLES
    for tensor in tensors[:num_sums]:
        tensor.sum()


def memcpy_s(size: Size) -> float:
    """Seconds that one copy of a group's bytes takes, into warm shared memory."""
    sources = [np.zeros(size.num_bytes, np.uint8) for _ in range(_POOL)]
    rounds = max(3, min(2000, (256 << 20) // size.num_bytes))
    with Segment.create(64 << 20) as segment:
        slots = [segment.array[at : at + size.num_bytes] for at in range(0, 48 << 20, size.num_bytes)]
        start_s = time.perf_counter()
        for index in range(rounds):
            slots[index % len(slots)][:] = sources[index % _POOL]
        return (time.perf_counter() - start_s) / rounds
