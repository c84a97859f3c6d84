import importlib.util
from pathlib import Path

import pytest

from tests.examples.follow import follow_example, numbers, rises


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_trl_is_fed(tmp_path: Path) -> None:
    rewards = numbers(r"'reward': '?([0-9.]+)", follow_example("trl_grpo", tmp_path))
    assert len(rewards) == 40
    assert rises(rewards, by=0.2)
