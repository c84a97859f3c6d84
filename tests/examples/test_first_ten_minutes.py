import re
from pathlib import Path

import pytest

from tests.examples.follow import ROOT, follow, numbers


@pytest.mark.slow
def test_first_ten_minutes_end_in_a_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "first-ten-minutes.md").read_text()
    folder = tmp_path / "first-run"
    folder.mkdir()
    for title, text in re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', page, flags=re.DOTALL):
        (folder / title).write_text(text)
    output = follow(page, tmp_path)
    rewards = numbers(r"reward=(\S+) staleness", output)
    assert len(rewards) == 60
    assert sum(rewards[:5]) / 5 < 0.15
    assert sum(rewards[-5:]) / 5 > 0.9, "as the page promises"
    assert "0=" in output, "samples show prompts"
