"""The examples, and the first ten minutes, do what their pages say, word for word."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LEFT_OUT = ("pip install", "fa-rollout-proc demo")
"""Blocks of a page that are tried elsewhere: what installs, and the demo."""

pytestmark = pytest.mark.slow


def shell_blocks(page: str) -> list[str]:
    """The page's shell blocks, but for what is tried elsewhere."""
    blocks = re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL)
    return [block for block in blocks if not any(words in block for words in LEFT_OUT)]


def follow(page: str, folder: Path) -> str:
    """What a reader sees who does as a page says in that folder."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": ""}
    process = subprocess.Popen(
        ["bash", "-ec", "".join(shell_blocks(page))],  # one shell, as the reader has: a `cd` holds
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, errors = process.communicate(timeout=110)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, errors[-5000:]
    return said


def follow_example(name: str, tmp_path: Path) -> str:
    """An example's page, in copies of all the folders."""
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("work", "__pycache__"))
    folder = tmp_path / "examples" / name
    return follow((folder / "README.md").read_text(), folder)


def rises(rewards: list[float], *, by: float) -> bool:
    """Whether the last five rewards are better than the first five."""
    return sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + by


def numbers(pattern: str, output: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, output)]


def counts(output: str) -> dict[str, int]:
    """The books, as the trainer's last line tells them."""
    (line,) = (line for line in output.splitlines() if line.startswith("taken="))
    return {name: int(count) for name, count in (word.split("=") for word in line.split())}


def test_own_trainer_learns_on_two_ranks(tmp_path: Path) -> None:
    output = follow_example("own_trainer", tmp_path)
    rewards = numbers(r"reward=(\S+)", output)
    assert len(rewards) == 40
    assert rises(rewards, by=0.2)
    assert counts(output)["trained"] == 40 * 8


def test_tool_use_trains_the_models_tokens_alone(tmp_path: Path) -> None:
    output = follow_example("tool_use", tmp_path)
    rewards, masked = numbers(r"reward=(\S+)", output), numbers(r"masked=(\S+)", output)
    assert len(rewards) == 60
    assert rises(rewards, by=0.2)
    # A third at most: a call, the tool's one token, an answer.
    assert 0.2 < sum(masked[-5:]) / 5 < 0.34
    assert rises(masked, by=0.05), "more samples call the tool in the end"


def test_own_filter_trains_what_can_be_learnt(tmp_path: Path) -> None:
    output = follow_example("own_filter", tmp_path)
    assert rises(numbers(r"reward=(\S+)", output), by=0.2)
    books = counts(output)
    assert books["trained"] == 20 * 8
    assert books["filtered"] > 100
    assert books["failed"] == books["dropped"] == 0


def test_transformers_trainer_is_fed(tmp_path: Path) -> None:
    rewards = numbers(r"'reward': '?([0-9.]+)", follow_example("hf_trainer", tmp_path))
    assert len(rewards) == 40
    assert rises(rewards, by=0.2)


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


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_trl_is_fed(tmp_path: Path) -> None:
    rewards = numbers(r"'reward': '?([0-9.]+)", follow_example("trl_grpo", tmp_path))
    assert len(rewards) == 40
    assert rises(rewards, by=0.2)
