"""The record schema: the layout of one group in the ring, written by the generator, read by the trainer.

A record is one group in columns: a msgpack `RecordHead` for scalars and metadata, then the packed arrays of
`COLUMNS` in order, then the extra columns of the run's configuration.

Shapes: N samples, T tokens of all samples (prompt and response), R response tokens of all samples,
S version spans of all samples.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

UNKNOWN_VERSION = -1
"""The engine reported no weight version, or one that cannot be parsed; never equal to the current version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One packed array of a record."""

    name: str
    dtype: str
    """numpy dtype string, little endian."""
    axis: str
    """Length of the first axis: `T`, `R`, `S`, `N`, or `N+1` for offsets; in extra columns also `T-N` (all
    tokens except the last of each sample) and `X` (the last entry of `cu_<name>`)."""
    shape: tuple[int, ...] = ()
    """Lengths of the other axes."""


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
"""`span_ends[s]` counts response tokens from the start of the sample; spans are half-open and cover it."""


_AXIS_OF = {"token": "T", "input_token": "T-N", "response_token": "R", "sample": "N", "item": "X"}


class ExtraColumn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An additional array per sample, declared in the run's configuration."""

    name: Annotated[str, msgspec.Meta(pattern="^[A-Za-z][A-Za-z0-9_]*$", max_length=64)]
    dtype: Literal[
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
    ] = "float32"
    per: Literal["token", "input_token", "response_token", "sample", "item"]
    """What a row belongs to: a token of prompt and response; the same without a sample's last token, which is
    never a model input; a response token; a sample; or an item (a sample has zero or more)."""
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=1)]], msgspec.Meta(max_length=3)] = []
    """Shape of one row."""


def columns_of(extra: Sequence[ExtraColumn]) -> tuple[Column, ...]:
    """All columns of a run's records, in order; an item column follows its offsets."""
    columns = list(COLUMNS)
    for wanted in extra:
        if wanted.per == "item":
            columns.append(Column(name=f"cu_{wanted.name}", dtype="<i4", axis="N+1"))
        columns.append(
            Column(
                name=wanted.name,
                dtype=wanted.dtype,
                axis=_AXIS_OF[wanted.per],
                shape=tuple(wanted.shape),
            )
        )
    return tuple(columns)


class TokenSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of a token, as the engine defines them.

    A record's log-probabilities are of softmax(logits / temperature) over the whole vocabulary, after
    penalties and before top-k, top-p and min-p.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def logprob_temperature(self) -> float:
        """Divisor of the logits in the reported log-probability. Below 1e-6 engines sample greedily and
        report log-probabilities at temperature 1."""
        return 1.0 if self.temperature < _GREEDY_BELOW else self.temperature


_GREEDY_BELOW = 1e-6
"""SGLang, sampling_params.py."""


@dataclass(frozen=True, slots=True)
class SamplingSpan:
    """Response tokens from the end of the span before up to `end` (exclusive), sampled with `settings`."""

    settings: TokenSampling
    end: int


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens from the end of the span before up to `end` (exclusive), sampled by `version`."""

    version: int
    end: int


class RecordHead(msgspec.Struct, frozen=True, kw_only=True):
    """The msgpack part of a record: identity, settings and outcome of one group."""

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
    sampling: TokenSampling
    """The run's configured parameters."""
    sampling_spans: list[list[tuple[TokenSampling, int]]] = []
    """Per sample: parameters, and the end of the response tokens sampled with them. Empty if `sampling`
    applies to every token."""
    reward_mean: float
    reward_std: float
    """ddof 1, over the scored samples that are trained, like the mean; 0 for a single sample."""
    reward_count: int
    excluded: list[int] = []
    """Indices of samples without a token in the loss; the three values above leave them out. A missing
    reward is NaN in its column."""
    started_s: float
    finished_s: float
    """time.monotonic() of this host."""
    metadata: dict[str, Any] = {}
    sample_metadata: list[dict[str, Any]] = []


def run_number(run: str) -> int:
    """64-bit hash of a run id, stored in record headers."""
    return int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest(), "little")


def schema_fingerprint(columns: tuple[Column, ...] = COLUMNS) -> int:
    """64-bit fingerprint of a schema: names, dtypes, axes, shapes and head fields, in order."""
    text = repr([(c.name, c.dtype, c.axis, c.shape) for c in columns]) + repr(RecordHead.__struct_fields__)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
