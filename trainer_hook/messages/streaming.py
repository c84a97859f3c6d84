"""The stages of a weight stream from the trainer to the engines; the hub forwards them unchanged.

A stream opens, joins a group if it broadcasts, sends bucket after bucket, and is sealed. The engines pause
from its opening to the end of the update.
"""

from enum import StrEnum

import msgspec

GROUP_TIMEOUT_S = 120.0
"""Timeout for forming a group, and for each broadcast."""


class Via(StrEnum):
    """How weights reach the engines."""

    DISK = "disk"
    """Safetensors files that each engine loads."""
    TENSOR = "tensor"
    """HTTP requests, bucket by bucket."""
    DISTRIBUTED = "distributed"
    """Broadcasts in a torch.distributed group of the leader and all engines."""


class _Stage(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    pass


class OpenStream(_Stage):
    """Pause the engines; their weights will be replaced piece by piece.

    Answered with an `Audience`; the answers to other stages carry no value.
    """

    via: Via
    partial: bool = False
    """Engines keep weights that are not sent, so only engines with the previous version take part."""


class Audience(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that take part in a stream."""

    urls: list[str]
    num_workers: int
    """Number of engine processes that hold weights: the group's ranks besides the leader."""
    group: str | None = None
    """Existing group of all of them; None: a new group is needed."""


class JoinGroup(_Stage):
    """Every worker of every engine joins a new process group, whose rank 0 is the leader."""

    group: str
    former: str | None
    """Group to destroy first."""
    address: str
    port: int
    backend: str
    """`gloo` or `nccl`."""


class TakeTensors(_Stage):
    """Engines load the bucket in a file: a pickle of (name, tensor) pairs, SGLang's format."""

    path: str


class TakeBroadcast(_Stage):
    """Engines receive one broadcast per tensor, in this order."""

    group: str
    names: list[str]
    dtypes: list[str]
    """Names of torch dtypes."""
    shapes: list[list[int]]


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Sample values of a weight, to compare with the engine's."""

    name: str
    num_rows: int
    """Number of rows to request; they begin with `values`."""
    values: dict[str, list[float]]
    """By the type that the engine may store."""
    before: list[float] = []
    """Values at engine start, if known and different."""


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """A short text with the trainer's log-probabilities; engines with the same weights agree."""

    input_ids: list[int]
    logprobs: list[float]
    """Log-probabilities of all tokens but the first."""
    is_float32: bool
    """The trainer's weights are float32; otherwise both sides round."""


class SealStream(_Stage):
    """Everything was sent: engines adopt the label of the new version."""

    probes: list[Probe] = []


Stage = OpenStream | JoinGroup | TakeTensors | TakeBroadcast | SealStream
