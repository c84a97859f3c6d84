"""Request bodies and request ids on the wire.

Invariant: no id ever used equals another or is a prefix of it, since engines match aborts by prefix.
"""

import itertools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fa_rollout.client.base.errors import RequestRefused

_SHOWN = 32
"""Characters of the caller's id that go into the wire id, for people who read engine logs."""

_ANSWER_BYTES = 1 << 22
_TOKEN_BYTES = 512
"""At most, of an output token: its id, its log-probability, its text."""
_TOKEN_BYTES_MORE = 1 << 14
"""The same of any token where the request asks for more, such as the experts or the nucleus of each."""
_MAX_NEW_TOKENS = 1 << 16
"""Where the request sets no limit."""

TokenIds = npt.NDArray[np.integer[Any]] | Sequence[int]

_ENCODER = msgspec.json.Encoder()


class WireIds:
    """Makes ids of equal length: a nonce of this pool, a serial number, the caller's id for the eye."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(4)
        self._serial = itertools.count()

    def make(self, rid: str) -> str:
        """An id that was never used before."""
        return f"{self._nonce}-{next(self._serial):010x}-{rid[:_SHOWN]:.<{_SHOWN}}"


def generate_body(
    rid: str,
    input_ids: TokenIds,
    sampling_params: Mapping[str, Any],
    *,
    options: Mapping[str, Any],
) -> bytes:
    """JSON of one `/generate` request: one sample, with log-probabilities of its output tokens."""
    request: dict[str, Any] = {
        "rid": rid,
        "input_ids": input_ids.tolist() if isinstance(input_ids, np.ndarray) else list(input_ids),
        "sampling_params": sampling_params,
        "return_logprob": True,
        "stream": False,
        **options,
    }
    return _ENCODER.encode(request)


def answer_limit(input_ids: TokenIds, sampling_params: Mapping[str, Any], options: Mapping[str, Any]) -> int:
    """Bytes that no true answer to this request exceeds."""
    num_new = int(sampling_params.get("max_new_tokens") or _MAX_NEW_TOKENS)
    if set(options) - {"extra_key"} or sampling_params.get("custom_params"):
        return _ANSWER_BYTES + _TOKEN_BYTES_MORE * (len(input_ids) + num_new)
    return _ANSWER_BYTES + _TOKEN_BYTES * num_new


def check_ids(rid: str, input_ids: TokenIds, vocab_size: int | None) -> None:
    """Ids outside of the vocabulary would kill an engine on the CPU: they are never sent.

    Raises:
        RequestRefused: there are such, or no ids at all.
    """
    ids = np.asarray(input_ids)
    if ids.size == 0:
        raise RequestRefused(f"input_ids must not be empty (request {rid})")
    low, high = ids.min(), ids.max()
    if vocab_size is not None and (low < 0 or high >= vocab_size):
        raise RequestRefused(
            f"input_ids must lie in [0, {vocab_size}), found {low} to {high} (request {rid})"
        )
