"""Plug-ins for the real slime."""

import copy
from typing import Any

from slime.rollout.sglang_rollout import generate


async def reward(args: Any, sample: Any, **options: Any) -> Any:
    if isinstance(sample, list):
        return [float(len(one.tokens) % 3) for one in sample]
    return float(len(sample.tokens) % 3)


async def two_of_each(args: Any, sample: Any, sampling_params: dict[str, Any]) -> list[Any]:
    """One execution, two trainable samples."""
    made = await generate(args, sample, sampling_params)
    made.rollout_id = made.index
    return [made, copy.deepcopy(made)]


async def raises(args: Any, sample: Any, **options: Any) -> float:
    raise ArithmeticError("no reward of this kind")
