"""What a worker answers, as bytes without power: the user's function runs there, and maybe a model's code.

In: `WorkerReady`, `WorkerRefused` or `Done`. Out: the same in the runner. Invariant: nothing but numbers and
texts of these forms is made of the bytes; others raise.
"""

import msgspec
import numpy as np

from fa_rollout.rewards.function import FunctionKind
from fa_rollout.rewards.outcomes import FailureReason, Outcomes, RewardFailed, RewardOutcome, Scored
from fa_rollout.rewards.workers.protocol import Done, WorkerReady, WorkerRefused

Answer = Done | WorkerReady | WorkerRefused
BadAnswer = msgspec.DecodeError
"""Raised by `decode`."""


class _Scored(msgspec.Struct, tag="scored", kw_only=True):
    value: float
    parts: dict[str, float]
    token_rewards: bytes | None


class _Failed(msgspec.Struct, tag="failed", kw_only=True):
    reason: FailureReason
    text: str


class _Done(msgspec.Struct, tag="done", kw_only=True):
    outcomes: list[_Scored | _Failed] | _Failed
    elapsed_s: float


class _Ready(msgspec.Struct, tag="ready", kw_only=True):
    kind: FunctionKind


class _Refused(msgspec.Struct, tag="refused", kw_only=True):
    text: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Done | _Ready | _Refused)


def encode(answer: Answer) -> bytes:
    """Bytes for `decode`."""
    match answer:
        case WorkerReady():
            return _encoder.encode(_Ready(kind=answer.kind))
        case WorkerRefused():
            return _encoder.encode(_Refused(text=answer.text))
    outcomes = answer.outcomes
    plain = _plain(outcomes) if isinstance(outcomes, RewardFailed) else [_plain(one) for one in outcomes]
    return _encoder.encode(_Done(outcomes=plain, elapsed_s=answer.elapsed_s))  # type: ignore[arg-type]


def decode(data: bytes) -> Answer:
    """An answer.

    Raises:
        BadAnswer: the bytes are none.
    """
    answer = _decoder.decode(data)
    match answer:
        case _Ready():
            return WorkerReady(answer.kind)
        case _Refused():
            return WorkerRefused(answer.text)
    return Done(_outcomes(answer.outcomes), answer.elapsed_s)


def _plain(outcome: RewardOutcome) -> _Scored | _Failed:
    if isinstance(outcome, RewardFailed):
        return _Failed(reason=outcome.reason, text=outcome.text)
    rewards = outcome.token_rewards
    return _Scored(
        value=float(outcome.value),
        parts={str(name): float(value) for name, value in outcome.parts.items()},
        token_rewards=None if rewards is None else np.asarray(rewards, np.float32).tobytes(),
    )


def _outcomes(plain: list[_Scored | _Failed] | _Failed) -> Outcomes:
    return _failed(plain) if isinstance(plain, _Failed) else [_outcome(one) for one in plain]


def _outcome(plain: _Scored | _Failed) -> RewardOutcome:
    if isinstance(plain, _Failed):
        return _failed(plain)
    data = plain.token_rewards
    if data is not None and len(data) % 4:
        raise BadAnswer("token_rewards must be float32")
    rewards = None if data is None else np.frombuffer(data, np.float32).copy()
    return Scored(value=plain.value, parts=plain.parts, token_rewards=rewards)


def _failed(plain: _Failed) -> RewardFailed:
    return RewardFailed(reason=plain.reason, text=plain.text)
