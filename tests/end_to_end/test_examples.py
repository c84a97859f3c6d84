"""The examples do what their pages say, word for word."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def commands(page: str) -> list[str]:
    """Lines of the page's shell blocks, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.slow
def test_own_trainer_learns(tmp_path: Path) -> None:
    folder = tmp_path / "own_trainer"
    shutil.copytree(EXAMPLES / "own_trainer", folder, ignore=shutil.ignore_patterns("work"))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(EXAMPLES.parent), "XDG_RUNTIME_DIR": ""}
    output = ""
    for command in commands((folder / "README.md").read_text()):
        # The installed command and the module are the same; the module is there without an installation too.
        words = command.replace("fa-rollout-proc", "python -m fa_rollout.cli").split()
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        output += done.stdout
    rewards = [float(reward) for reward in re.findall(r"reward=(\S+)", output)]
    assert len(rewards) == 40
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
