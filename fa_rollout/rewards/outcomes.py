"""Reads a reward function's result. A failure never becomes a number.

In: any object that the user's function returned. Out: `Scored` with a finite value, or `RewardFailed` with a
reason. Pure; runs in the function's process, so that the user's arrays and tensors are not sent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from fa_rollout.sample import FloatArray
from shm.errors import FaRolloutError

TOKEN_REWARDS = "token_rewards"
"""Entry of a reward dict with one reward per response token."""


_MAX_FLOAT32 = float(np.finfo(np.float32).max)


class RewardsLost(FaRolloutError, RuntimeError):
    """Rewards are unavailable for all samples: the run ends."""


class FailureReason(StrEnum):
    """Why a completion has no reward."""

    RAISED = "raised"
    """The function raised an exception."""
    TIMEOUT = "timeout"
    """The function exceeded `reward.timeout_s` and was cancelled."""
    WORKER_DIED = "worker_died"
    """The worker process died on this sample twice (out of memory, segmentation fault, exit)."""
    BAD_VALUE = "bad_value"
    """The function did not return a finite number."""
    NOT_SENT = "not_sent"
    """The sample cannot be sent to a worker process."""
    CLOSED = "closed"
    """The run ended first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A reward."""

    value: float
    """Finite in float32."""
    parts: dict[str, float] = field(default_factory=dict)
    """The other numeric entries of a reward dict, by name."""
    token_rewards: FloatArray | None = None
    """[R] Finite; from the `token_rewards` entry of a reward dict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailed:
    """A sample without a reward, and the reason."""

    reason: FailureReason
    text: str


RewardOutcome = Scored | RewardFailed
Outcomes = list[RewardOutcome] | RewardFailed
"""One outcome per sample, or one failure for all samples of a call."""


class _Bad(ValueError):
    pass


def read(result: Any, *, key: str | None, num_tokens: int) -> RewardOutcome:
    """The outcome for one sample; `num_tokens` is the length of its response, `key` is `reward.key`."""
    try:
        if isinstance(result, Mapping):
            return _from_mapping(result, key, num_tokens)
        if key is not None:
            raise _Bad(f"with reward.key = {key!r}, the function must return a dict, found {_shown(result)}")
        return Scored(value=_number(result))
    except _Bad as error:
        return RewardFailed(reason=FailureReason.BAD_VALUE, text=str(error))


def read_group(result: Any, *, key: str | None, nums_tokens: Sequence[int]) -> Outcomes:
    """The outcomes for the samples of a group, whose function returns a list."""
    num_samples = len(nums_tokens)
    is_list = isinstance(result, list | tuple) or (hasattr(result, "__len__") and hasattr(result, "tolist"))
    if not is_list or getattr(result, "ndim", 1) != 1:
        text = f"a group reward must return a list of {num_samples} rewards, found {_shown(result)}"
    elif len(result) != num_samples:
        text = f"a group reward must return one reward per sample: {num_samples} samples, found {len(result)}"
    else:
        return [read(r, key=key, num_tokens=n) for r, n in zip(result, nums_tokens, strict=True)]
    return RewardFailed(reason=FailureReason.BAD_VALUE, text=text)


def _from_mapping(result: Mapping[Any, Any], key: str | None, num_tokens: int) -> Scored:
    if key is None:
        raise _Bad(
            f"the function returned a dict; set reward.key to the entry that is the reward {_keys(result)}"
        )
    if key not in result:
        raise _Bad(f"reward.key = {key!r} is missing in the dict that the function returned {_keys(result)}")
    parts = {}
    for name, value in result.items():
        if name not in (key, TOKEN_REWARDS):
            try:
                parts[str(name)] = _number(value)
            except _Bad:
                continue
    token_rewards = result.get(TOKEN_REWARDS)
    return Scored(
        value=_number(result[key]),
        parts=parts,
        token_rewards=None if token_rewards is None else _token_rewards(token_rewards, num_tokens),
    )


def _number(value: Any) -> float:
    """A finite float from a Python, numpy or torch number, or an array of one element; text is refused."""
    try:
        if hasattr(value, "item") and hasattr(value, "shape"):
            value = value.item()
        if not hasattr(type(value), "__float__"):
            raise _Bad(f"a reward must be a number, found {_shown(value)}")
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, _Bad):
            raise
        raise _Bad(f"a reward must be one number, found {_shown(value)} ({error})") from error
    if not math.isfinite(number) or abs(number) > _MAX_FLOAT32:
        raise _Bad(f"a reward must be finite in float32, found {number}")
    return number


def _token_rewards(value: Any, num_tokens: int) -> FloatArray:
    try:
        rewards = np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _Bad(f"token_rewards must be a list of numbers, found {_shown(value)} ({error})") from error
    if rewards.shape != (num_tokens,):
        raise _Bad(
            f"token_rewards must have one number per response token: {num_tokens}, found {rewards.shape}"
        )
    if not np.isfinite(rewards).all():
        raise _Bad("token_rewards must be finite")
    return rewards


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 100 else text[:100] + '...'}"


def _keys(result: Mapping[Any, Any]) -> str:
    return f"(its keys: {', '.join(map(repr, result))})"
