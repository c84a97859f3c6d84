"""A reader who does what a page says, word for word."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LEFT_OUT = ("pip install", "fa-rollout-proc demo")
"""Blocks of a page that are tried elsewhere: what installs, and the demo."""


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


def numbers(pattern: str, output: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, output)]


def rises(rewards: list[float], *, by: float) -> bool:
    """Whether the last five rewards are better than the first five."""
    return sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + by


def counts(output: str) -> dict[str, int]:
    """The books, as the trainer's last line tells them."""
    (line,) = (line for line in output.splitlines() if line.startswith("taken="))
    return {name: int(count) for name, count in (word.split("=") for word in line.split())}
