"""Plug-ins for the real slime."""

import copy
import json
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


def note_rollout_id(args: Any, sample: Any, rollout_id: int | None) -> None:
    sample.metadata["hooked_in"] = rollout_id


def remove_first(args: Any, groups: list[list[Any]]) -> None:
    groups[0][0].remove_sample = True


def note_all(args: Any, groups: list[list[Any]], data_source: Any) -> None:
    """One line of JSON for each call: what it was given."""
    seen = {
        "groups": [group[0].group_index for group in groups],
        "hooked_in": [sample.metadata["hooked_in"] for group in groups for sample in group],
        "num_removed": sum(sample.remove_sample for group in groups for sample in group),
        "takes_groups": callable(data_source),
    }
    with open(os.environ["FA_ROLLOUT_TEST_SEEN"], "a") as file:
        file.write(json.dumps(seen) + "\n")


def note_the_time(path: Path) -> None:
    path.write_text(str(time.time()))
