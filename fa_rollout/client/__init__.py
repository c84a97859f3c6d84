"""The client of SGLang engines: the one place that knows their protocol from this side."""

from fa_rollout.client.completion import Completion
from fa_rollout.client.dispatch import Balance
from fa_rollout.client.errors import (
    ClientError,
    ControlFailed,
    EngineOverloaded,
    EngineUnavailable,
    FailureClass,
    InvalidReply,
    RequestFailed,
    RequestRefused,
    RequestTimedOut,
)
from fa_rollout.client.policy import FailurePolicy
from fa_rollout.client.pool import EnginePool
from fa_rollout.client.probe import EngineInfo
from fa_rollout.client.statistics import LaneStatistics, PoolStatistics

__all__ = [
    "Balance",
    "ClientError",
    "Completion",
    "ControlFailed",
    "EngineInfo",
    "EngineOverloaded",
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
