"""Runs of the whole system below a benchmark: how they end, and which process is which."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

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


def words(process: psutil.Process) -> list[str]:
    """Its command line; none where it has ended, waited for or not."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def failure(code: int, log: Path) -> str:
    """How a run ended, and what it said last."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_NUM_LINES:]
    return "\n".join([f"a run must end with code 0, found {code}; its last lines:", *lines])
