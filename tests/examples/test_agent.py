from pathlib import Path

import pytest

from tests.examples.follow import follow_example, numbers, rises


@pytest.mark.slow
def test_an_agent_of_a_framework_learns_to_use_its_tool(tmp_path: Path) -> None:
    output = follow_example("agent", tmp_path)
    rewards, masked = numbers(r"reward=(\S+)", output), numbers(r"masked=(\S+)", output)
    assert len(rewards) == 40
    assert rises(rewards, by=0.15)
    assert rises(masked, by=0.03), "more samples call the tool in the end"
