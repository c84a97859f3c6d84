"""The record schema: what one group looks like in the ring. The consumer owns it; the generator fills it.

A record is one group, columnar: a msgpack `RecordHead` for scalars and metadata, then the packed arrays of
`COLUMNS` in their order, then the extra columns that the run's configuration names.

Shapes: N samples, T tokens of all samples (prompt and response), R response tokens of all samples,
S version spans of all samples.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

UNKNOWN_VERSION = -1
"""A weight version that the engine did not tell, or told in a form of no meaning; never current."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One packed array of a record."""

    name: str
    dtype: str
    """numpy dtype string, little endian."""
    axis: str
    """What the first axis counts: `T`, `R`, `S`, `N`, or `N+1` for offsets."""


COLUMNS = (
    Column(name="tokens", dtype="<i4", axis="T"),
    Column(name="cu_seqlens", dtype="<i4", axis="N+1"),
    Column(name="cu_responses", dtype="<i4", axis="N+1"),
    Column(name="logprobs", dtype="<f4", axis="R"),
    Column(name="loss_mask", dtype="|u1", axis="R"),
    Column(name="span_versions", dtype="<i8", axis="S"),
    Column(name="span_ends", dtype="<i4", axis="S"),
    Column(name="cu_spans", dtype="<i4", axis="N+1"),
    Column(name="rewards", dtype="<f4", axis="N"),
)
"""`span_ends[s]` counts response tokens from the start of its sample; spans are half open and cover it."""


class RecordHead(msgspec.Struct, frozen=True, kw_only=True):
    """The msgpack part of a record: identity, settings and outcomes of one group."""

    group: int
    """Position of the group in the run's endless stream of prompts; unique in a run."""
    attempt: int
    epoch: int
    prompt_index: int
    """Row of the data."""
    prompt: str
    label: Any
    members: list[int]
    """Member index of each sample."""
    finish_reasons: list[str]
    temperature: float
    top_p: float
    reward_mean: float
    reward_std: float
    """ddof 1, over the scored executions; 0 for one."""
    reward_count: int
    started_s: float
    finished_s: float
    """time.monotonic() of this host."""
    metadata: dict[str, Any] = {}
    sample_metadata: list[dict[str, Any]] = []


def run_number(run: str) -> int:
    """64-bit number of a run id, as record headers carry it."""
    return int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest(), "little")


def schema_fingerprint(columns: tuple[Column, ...] = COLUMNS) -> int:
    """64-bit fingerprint of a schema; equal for equal names, dtypes, axes and head fields, in order."""
    text = repr([(c.name, c.dtype, c.axis) for c in columns]) + repr(RecordHead.__struct_fields__)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
