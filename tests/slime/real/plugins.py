"""Plug-ins for the real slime."""

import copy
import os
import time
from pathlib import Path
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


async def reward_equal_in_odd_groups(args: Any, sample: Any, **options: Any) -> float:
    return float(sample.index % 2) if sample.group_index % 2 == 0 else 1.0


async def raises_in_group_2(args: Any, sample: Any, **options: Any) -> float:
    if sample.group_index == 2:
        note_the_time(Path(os.environ["FA_ROLLOUT_TEST_RAISED"]))
        raise ArithmeticError("no reward for group 2")
    return 1.0


def note_the_time(path: Path) -> None:
    path.write_text(str(time.time()))
