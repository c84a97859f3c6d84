from pathlib import Path

import pytest

from tests.examples.follow import follow_example, numbers, rises


@pytest.mark.slow
def test_tool_use_trains_the_models_tokens_alone(tmp_path: Path) -> None:
    output = follow_example("tool_use", tmp_path)
    rewards, masked = numbers(r"reward=(\S+)", output), numbers(r"masked=(\S+)", output)
    assert len(rewards) == 60
    assert rises(rewards, by=0.2)
    # A third at most: a call, the tool's one token, an answer.
    assert 0.2 < sum(masked[-5:]) / 5 < 0.34
    assert rises(masked, by=0.05), "more samples call the tool in the end"
