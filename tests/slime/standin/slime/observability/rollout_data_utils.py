"""Checks of what is trained."""

from typing import Any


def validate_rollout_routed_experts_for_replay(experts: list[Any], args: Any) -> None:
    for one in experts:
        if one.ndim != 3:
            raise ValueError(f"routed experts must be [tokens, layers, experts], found {tuple(one.shape)}")
