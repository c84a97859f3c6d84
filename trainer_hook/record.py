"""The record schema: what one group looks like in the ring. The consumer owns it; the generator fills it.

A record is one group, columnar: a msgpack `RecordHead` for scalars and metadata, then the packed arrays of
`COLUMNS` in their order, then the extra columns that the run's configuration names.

Shapes: N samples, T tokens of all samples (prompt and response), R response tokens of all samples,
S version spans of all samples.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

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
    """What the first axis counts: `T`, `R`, `S`, `N`, or `N+1` for offsets; of extra columns also `T-N` (all
    tokens but each sample's last) and `X` (as many as the last entry of `cu_<name>`)."""
    shape: tuple[int, ...] = ()
    """The other axes."""


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


_AXIS_OF = {"token": "T", "input_token": "T-N", "response_token": "R", "sample": "N", "item": "X"}


class ExtraColumn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A further array of every sample, which a run's configuration names."""

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
    """What has a row: each token of prompt and response; each but a sample's last, which no model ran; each
    response token; a sample as a whole; or any number of items a sample, none included."""
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=1)]], msgspec.Meta(max_length=3)] = []
    """Of one row."""


def columns_of(extra: Sequence[ExtraColumn]) -> tuple[Column, ...]:
    """All columns of a run's records, in order; those of items have their offsets in front."""
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
    """How a token was sampled, in the engine's terms.

    Log-probabilities of a record are those of softmax(logits / temperature) over the whole vocabulary, after
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
        """What the logits of its log-probability were divided by: engines sample greedily below 1e-6, and
        report log-probabilities at temperature 1 then."""
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
    sampling: TokenSampling
    """As the run's configuration has it."""
    sampling_spans: list[list[tuple[TokenSampling, int]]] = []
    """By sample: settings, and the end of the response tokens that were sampled with them. Empty where
    `sampling` holds for every token."""
    reward_mean: float
    reward_std: float
    """ddof 1, over the scored executions that are trained, as the mean; 0 for one."""
    reward_count: int
    excluded: list[int] = []
    """Indices of samples without a token in the loss: they do not count in the three figures above. Such a
    sample may have no reward, which is NaN in its column."""
    started_s: float
    finished_s: float
    """time.monotonic() of this host."""
    metadata: dict[str, Any] = {}
    sample_metadata: list[dict[str, Any]] = []


def run_number(run: str) -> int:
    """64-bit number of a run id, as record headers carry it."""
    return int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest(), "little")


def schema_fingerprint(columns: tuple[Column, ...] = COLUMNS) -> int:
    """64-bit fingerprint of a schema: of names, dtypes, axes, shapes and head fields, in order."""
    text = repr([(c.name, c.dtype, c.axis, c.shape) for c in columns]) + repr(RecordHead.__struct_fields__)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
