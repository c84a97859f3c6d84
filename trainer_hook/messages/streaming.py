"""The stages of a stream of weights from the trainer to the engines; the hub passes them on as they are.

A stream opens, joins a group where it broadcasts, sends bucket after bucket, and is sealed. The engines stand
still from its opening to the end of the update.
"""

from enum import StrEnum

import msgspec

GROUP_TIMEOUT_S = 120.0
"""For the members of a group to meet, and for each broadcast."""


class Via(StrEnum):
    """How weights get to the engines."""

    DISK = "disk"
    """By safetensors files that each engine loads."""
    TENSOR = "tensor"
    """Inside of HTTP requests, bucket by bucket."""
    DISTRIBUTED = "distributed"
    """By broadcasts of a torch.distributed group of the leader and all engines."""


class _Stage(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    pass


class OpenStream(_Stage):
    """Engines stand still, and are told that their weights will be replaced piece by piece.

    Answered with an `Audience`; the other stages have no value.
    """

    via: Via
    partial: bool = False
    """Weights that are not sent stay: engines that do not hold the version before cannot take part."""


class Audience(msgspec.Struct, frozen=True, kw_only=True):
    """Who takes part in a stream."""

    urls: list[str]
    num_workers: int
    """Processes of all engines that hold weights: the ranks of a group beside the leader's."""
    group: str | None = None
    """The group that all of them are in still; None when one has to be made."""


class JoinGroup(_Stage):
    """Every worker of every engine joins a new process group, whose rank 0 is the leader."""

    group: str
    former: str | None
    """A group to be destroyed first."""
    address: str
    port: int
    backend: str
    """`gloo` or `nccl`."""


class TakeTensors(_Stage):
    """Engines take the bucket in a file: a pickle of (name, tensor) pairs, as SGLang wants it."""

    path: str


class TakeBroadcast(_Stage):
    """Engines receive one broadcast a tensor, in this order."""

    group: str
    names: list[str]
    dtypes: list[str]
    """As attributes of torch are called."""
    shapes: list[list[int]]


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Some numbers of a weight, which an engine that has it can be asked for."""

    name: str
    num_rows: int
    """Of the weight, to be asked for; of these the first numbers are `values`."""
    values: dict[str, list[float]]
    """By the type that an engine may have rounded them to."""
    before: list[float] = []
    """What engines start with, where that is known and differs."""


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """A short text and how likely the trainer's model finds it; an engine that holds its weights agrees."""

    input_ids: list[int]
    logprobs: list[float]
    """Of every token but the first."""
    is_float32: bool
    """The trainer's weights are; else both ends round."""


class SealStream(_Stage):
    """Everything was sent: engines tell the label of the new version."""

    probes: list[Probe] = []


Stage = OpenStream | JoinGroup | TakeTensors | TakeBroadcast | SealStream
