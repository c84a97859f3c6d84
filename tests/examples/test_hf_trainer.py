from pathlib import Path

import pytest

from tests.examples.follow import follow_example, numbers, rises


@pytest.mark.slow
def test_transformers_trainer_is_fed(tmp_path: Path) -> None:
    rewards = numbers(r"'reward': '?([0-9.]+)", follow_example("hf_trainer", tmp_path))
    assert len(rewards) == 40
    assert rises(rewards, by=0.2)
