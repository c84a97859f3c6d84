"""The client of SGLang engines: the one place that knows their protocol from this side."""

from fa_rollout.client.base.errors import (
    ClientError,
    ControlFailed,
    EngineUnavailable,
    FailureClass,
    InvalidReply,
    RequestFailed,
    RequestRefused,
    RequestTimedOut,
)
from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.client.engine.standing import EngineInfo
from fa_rollout.client.fleet.dispatch import Balance
from fa_rollout.client.pool import EnginePool
from fa_rollout.client.requests.statistics import LaneStatistics, PoolStatistics
from fa_rollout.client.wire.completion import Completion

__all__ = [
    "Balance",
    "ClientError",
    "Completion",
    "ControlFailed",
    "EngineInfo",
    "EnginePool",
    "EngineUnavailable",
    "FailureClass",
    "FailurePolicy",
    "InvalidReply",
    "LaneStatistics",
    "PoolStatistics",
    "RequestFailed",
    "RequestRefused",
    "RequestTimedOut",
]
