"""What crosses the inherited sockets between slime's rollout manager and its generator.

One way a group's prompts, the other way what its samples hold beside the record: everything of slime's
`Sample` but the three long lists, which go through the ring.

Invariant: pickles come from inherited descriptors, or from a file in the run's private folder that such a
message names; never from a socket that others can reach, and never from the ring.
"""

import os
import pickle
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

INLINE_BYTES = 16 << 20
"""Larger payloads (routed experts, images) go by a file."""

COLUMNS = ("tokens", "rollout_log_probs", "loss_mask")
"""Attributes of a sample that the ring carries."""


class SlimeSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What every life of the generator gets."""

    args: bytes
    """Pickle of slime's arguments."""
    options: dict[str, Any]
    directory: str


class WirePrompt(msgspec.Struct, frozen=True, array_like=True):
    """A group that is to be rolled out."""

    ids: bytes
    """int32 ids of the prompt that all its samples share; empty where slime's own rules must find them."""
    samples: bytes
    """Pickle of a list of slime's samples, as the data source gave them."""


class SampleRest(msgspec.Struct, frozen=True, array_like=True):
    """What the samples of a finished group hold beside the ring's columns."""

    shape: list[int]
    """By member: 0 for a sample, k for a list of k samples (fan-out)."""
    states: bytes
    """Pickle of (class, attributes) of each sample; empty: it is in the file `path`."""
    path: str = ""


_DECODE_PROMPT = msgspec.msgpack.Decoder(WirePrompt)
_DECODE_REST = msgspec.msgpack.Decoder(SampleRest)


def encode_prompt(pickled: bytes, ids: Sequence[int]) -> bytes:
    """A group for `Feed`."""
    return msgspec.msgpack.encode(WirePrompt(np.asarray(ids, np.int32).tobytes(), pickled))


def decode_prompt(payload: bytes) -> tuple[npt.NDArray[np.int32], bytes]:
    """(ids, pickled samples) of a fed group."""
    prompt = _DECODE_PROMPT.decode(payload)
    return np.frombuffer(prompt.ids, np.int32), prompt.samples


def encode_rest(group: Sequence[Any], directory: str) -> bytes:
    """The rest of a group's samples, in a message or in a file of `directory`."""
    shape = [len(member) if isinstance(member, list) else 0 for member in group]
    states = pickle.dumps([_state(sample) for sample in flatten(group)], pickle.HIGHEST_PROTOCOL)
    if len(states) <= INLINE_BYTES:
        return msgspec.msgpack.encode(SampleRest(shape, states))
    path = Path(directory, f"rest-{secrets.token_hex(8)}")
    path.write_bytes(states)
    return msgspec.msgpack.encode(SampleRest(shape, b"", str(path)))


def decode_rest(payload: bytes) -> tuple[list[int], list[Any]]:
    """(shape, flat samples without the ring's columns); the attributes that are None stay None."""
    rest = _DECODE_REST.decode(payload)
    states = rest.states
    if rest.path:
        states = Path(rest.path).read_bytes()
        os.unlink(rest.path)
    return rest.shape, [_revive(kind, state) for kind, state in pickle.loads(states)]


def flatten(group: Sequence[Any]) -> list[Any]:
    """All samples of a group in order, those of a fan-out one by one."""
    return [s for member in group for s in (member if isinstance(member, list) else (member,))]


def regroup(shape: Sequence[int], samples: Sequence[Any]) -> list[Any]:
    """The inverse of `flatten`."""
    rest = iter(samples)
    return [[next(rest) for _ in range(size)] if size else next(rest) for size in shape]


def _state(sample: Any) -> tuple[type, dict[str, Any]]:
    state = {name: value for name, value in vars(sample).items() if name not in COLUMNS or value is None}
    return type(sample), state


def _revive(kind: Any, state: dict[str, Any]) -> Any:
    sample = kind.__new__(kind)
    vars(sample).update(state)
    return sample
