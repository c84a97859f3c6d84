from pathlib import Path

import pytest

from tests.examples.follow import counts, follow_example, numbers, rises


@pytest.mark.slow
def test_own_trainer_learns_on_two_ranks(tmp_path: Path) -> None:
    output = follow_example("own_trainer", tmp_path)
    rewards = numbers(r"reward=(\S+)", output)
    assert len(rewards) == 40
    assert rises(rewards, by=0.2)
    assert counts(output)["trained"] == 40 * 8
