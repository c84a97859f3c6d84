"""The demo's tasks: rewards by hand-made completions, prompts by seed."""

from typing import Any

import numpy as np
import pytest

from fa_rollout.demo.task import (
    CHARACTERS,
    arithmetic_prompts,
    arithmetic_reward,
    sorting_prompts,
    sorting_reward,
)
from fa_rollout.sample import FinishReason, Sample


def sample(response: str, label: Any, finish: FinishReason = FinishReason.STOP) -> Sample:
    return Sample(
        group=0,
        member=0,
        attempt=0,
        epoch=0,
        prompt_index=0,
        prompt="",
        label=label,
        metadata={},
        prompt_ids=np.empty(0, np.int32),
        response=response,
        finish_reason=finish,
    )


@pytest.mark.parametrize(
    ("response", "finish", "reward"),
    [
        ("1348", FinishReason.STOP, 1.0),
        ("1348", FinishReason.LENGTH, 0.8),
        ("13489", FinishReason.LENGTH, 0.8),
        ("1384", FinishReason.STOP, 0.6),
        ("134", FinishReason.STOP, 0.6),
        ("", FinishReason.STOP, 0.0),
        ("9999", FinishReason.LENGTH, 0.0),
    ],
)
def test_sorting_pays_by_place_and_for_stopping(response: str, finish: FinishReason, reward: float) -> None:
    assert sorting_reward(sample(response, "1348", finish)) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("57", 1.0),
        ("57.", 1.0),
        (" 57\n", 1.0),
        ("The answer is 57", 0.5),
        ("58", 0.0),
        ("57 or 58", 0.0),
        ("", 0.0),
    ],
)
def test_arithmetic_pays_for_the_last_number(response: str, reward: float) -> None:
    assert arithmetic_reward(sample(response, 57)) == reward


def test_prompts_depend_on_the_seed_alone_and_fit_the_vocabulary() -> None:
    rows = sorting_prompts(50, seed=3)
    assert rows == sorting_prompts(50, seed=3) != sorting_prompts(50, seed=4)
    for row in rows:
        assert set(row["prompt"]) | set(row["label"]) <= set(CHARACTERS)
        assert sorted(row["prompt"][:-1]) == list(row["label"])


def test_arithmetic_labels_are_right() -> None:
    for row in arithmetic_prompts(100, seed=0):
        left, right = row["prompt"][-1]["content"].split(" + ")
        assert int(left) + int(right) == row["label"]
