"""What ranks of several nodes hear when one of them keeps silent, as a machine without power does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer_hook.nodes_rank import NUM_RANKS, SILENT

pytestmark = pytest.mark.slow


@pytest.mark.timeout(120)
def test_a_silent_node_is_named_when_the_run_would_stall(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.trainer_hook.nodes_rank"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        said = [
            [json.loads(line) for line in rank.communicate(timeout=100)[0].splitlines()] for rank in ranks
        ]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    by_silent = {silent: [of_rank[place] for of_rank in said] for place, silent in enumerate(SILENT)}
    first, second, third = by_silent[1]
    assert "node 1 (" in first
    assert "sent nothing for 2 s (trainer.stall_s)" in first
    assert second is None
    assert "node 0 (" in third
    assert "its own error names the node that is lost" in third
    assert by_silent[0][0] is None
    for text in by_silent[0][1:]:
        assert "node 0 (" in text
        assert "sent nothing for 2 s (trainer.stall_s)" in text
