"""A group, decoded from one record of the ring.

In: a verified record. Out: its head, its columns by name, and sample offsets as plain numbers.

Invariant: a record whose columns disagree in length is refused. After `close` the group no longer exposes its
columns, so only views that the trainer kept still map the record.
"""

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shm.errors import DescriptorRefused
from shm.ring.reader import Record, RingReader
from shm.ring.words import Descriptor
from trainer_hook.errors import StaleView
from trainer_hook.messages import Handout
from trainer_hook.record import COLUMNS, Column, RecordHead, TokenSampling

_HEAD = msgspec.msgpack.Decoder(RecordHead)


class Group:
    """A group of samples, mapped while its batch is open."""

    __slots__ = (
        "_columns",
        "_keep",
        "_memory",
        "_record",
        "ends",
        "extra",
        "head",
        "response_ends",
        "rewards",
        "spans",
    )

    def __init__(self, record: Record, *, columns: Sequence[Column] = COLUMNS, keep: bool = False) -> None:
        """Decode a record that holds `columns`. `keep`: the columns are copies, valid after the batch.

        Raises:
            DescriptorRefused: head or columns do not match the schema.
        """
        self.head = _decode_head(record)
        arrays = dict(zip((column.name for column in columns), record.arrays, strict=False))
        _check(self.head, columns, arrays, record.sequence)
        self._record = record
        self.extra = {c.name: c.axis for c in columns[len(COLUMNS) :] if c.axis != "N+1"}
        """Extra columns, with the name of their first axis."""
        base = record.arrays[0].base
        assert isinstance(base, np.ndarray)
        self._memory = weakref.ref(base)
        self._columns: dict[str, npt.NDArray[Any]] | None = arrays
        self._keep = keep
        self.ends: list[int] = arrays["cu_seqlens"].tolist()
        self.response_ends: list[int] = arrays["cu_responses"].tolist()
        self.rewards: list[float] = arrays["rewards"].tolist()
        self.spans = _spans(arrays)

    @property
    def sequence(self) -> int:
        return self._record.sequence

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Columns by name, read-only views of the ring. Raises StaleView after the batch has ended."""
        if self._columns is None:
            raise StaleView(
                f"a batch must be read inside its `with` block; group {self.head.group} was used after the "
                "block: keep tensors read inside it, or get the batch with next_batch(copy=True)"
            )
        return self._columns

    def extra_of(self, name: str, index: int) -> npt.NDArray[Any]:
        """One sample's rows of an extra column, or its value in a column per sample."""
        column, axis = self.columns[name], self.extra[name]
        match axis:
            case "N":
                return column[index : index + 1].reshape(column.shape[1:])
            case "T":
                return column[self.ends[index] : self.ends[index + 1]]
            case "T-N":
                return column[self.ends[index] - index : self.ends[index + 1] - index - 1]
            case "R":
                return column[self.response_ends[index] : self.response_ends[index + 1]]
        start, end = self.columns[f"cu_{name}"][index : index + 2]
        return column[start:end]

    def sampling_of(self, index: int) -> list[tuple[TokenSampling, int]]:
        """One sample's sampling parameters, each with the end of its response tokens."""
        if self.head.sampling_spans:
            return self.head.sampling_spans[index]
        num_tokens = self.response_ends[index + 1] - self.response_ends[index]
        return [(self.head.sampling, num_tokens)] if num_tokens else []

    @property
    def memory(self) -> "weakref.ref[npt.NDArray[np.uint8]] | None":
        """The record's bytes in the ring, while any view of them exists; None for a copy."""
        return None if self._keep else self._memory

    def on_release(self, callback: Callable[[int], None]) -> None:
        """Call `callback(sequence)`, from any thread, when the last view of the record is freed."""
        self._record.on_release(callback)

    def close(self) -> None:
        """Release the record; views that the trainer kept hold it until they are freed."""
        if not self._keep:
            self._columns = None
        self._record.close()


def open_groups(
    reader: RingReader, handouts: Sequence[Handout], *, columns: Sequence[Column] = COLUMNS, copy: bool
) -> list[Group]:
    """Verify and map the records of a batch.

    Raises:
        DescriptorRefused: a record does not match its descriptor; no record stays mapped.
    """
    groups: list[Group] = []
    try:
        for handout in handouts:
            descriptor = Descriptor(
                incarnation=handout.incarnation,
                sequence=handout.sequence,
                position=handout.position,
                length=handout.length,
            )
            groups.append(Group(reader.open(descriptor, copy=copy), columns=columns, keep=copy))
    except BaseException:
        for group in groups:
            group.close()
        raise
    return groups


def _decode_head(record: Record) -> RecordHead:
    try:
        return _HEAD.decode(record.head)
    except msgspec.DecodeError as error:
        raise DescriptorRefused(
            f"a record's head must follow this release's schema; the head of record {record.sequence} does "
            f"not ({error}): install the same release of fa_rollout everywhere"
        ) from error


def _check(
    head: RecordHead, columns: Sequence[Column], arrays: dict[str, npt.NDArray[Any]], sequence: int
) -> None:
    if len(arrays) == len(columns) and _agree(len(head.members), columns, arrays):
        return
    shapes = {name: array.shape for name, array in arrays.items()}
    raise DescriptorRefused(
        f"a record's columns must agree on samples, tokens and responses; record {sequence} has "
        f"{len(head.members)} samples and columns of {shapes}"
    )


def _agree(num_samples: int, columns: Sequence[Column], arrays: dict[str, npt.NDArray[Any]]) -> bool:
    def last(name: str) -> int:
        offsets = arrays[name]
        return int(offsets[-1]) if len(offsets) == num_samples + 1 else -1

    num_tokens = last("cu_seqlens")
    lengths = {
        "N": num_samples,
        "N+1": num_samples + 1,
        "T": num_tokens,
        "T-N": num_tokens - num_samples,
        "R": last("cu_responses"),
        "S": last("cu_spans"),
    }
    return all(
        arrays[column.name].shape
        == (last(f"cu_{column.name}") if column.axis == "X" else lengths[column.axis], *column.shape)
        for column in columns
    )


def _spans(columns: dict[str, npt.NDArray[Any]]) -> list[list[tuple[int, int]]]:
    """Per sample: (version, end) of each version span, in order."""
    bounds = columns["cu_spans"].tolist()
    spans = list(zip(columns["span_versions"].tolist(), columns["span_ends"].tolist(), strict=True))
    return [spans[start:end] for start, end in pairwise(bounds)]
