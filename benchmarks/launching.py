"""Runs of the whole system below a benchmark: their output is kept, and shown when one fails."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

_NUM_LINES = 30


def run_to_its_end(command: Sequence[str], log: Path) -> None:
    """Wait for a run that must end well.

    Raises:
        RuntimeError: it did not; with its last words.
    """
    with log.open("wb") as file:
        code = subprocess.run(command, stderr=file, check=False).returncode
    if code != 0:
        raise RuntimeError(failure(code, log))


def failure(code: int, log: Path) -> str:
    """How a run ended, and what it said last."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_NUM_LINES:]
    return "\n".join([f"a run must end with code 0, found {code}; its last lines:", *lines])
