"""A launcher in a process of its own, as a person starts it, and an account of everything below it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from fa_rollout.config import to_toml
from fa_rollout.engines.tiny_model import write_tiny_model
from tests.client.client_kit import as_started
from tests.hub.rig import merged, words
from tests.kit.scripted import ScriptedEngine

DEADLINE_S = 30.0


def write_run(folder: Path, **changes: dict[str, Any]) -> None:
    """A run on the engine of `serve`, or on one that does not exist: then it starts for as long as a test
    likes, and its trainer is never started."""
    engine = folder / "engine"
    (folder / "data.jsonl").write_text('{"prompt": "1=", "label": "1"}\n')
    model = write_tiny_model(folder / "model", characters="0123456789=")
    tree: dict[str, dict[str, Any]] = {
        "data": {"path": str(folder / "data.jsonl")},
        "rollout": {"num_steps": 1, "groups_per_step": 1, "samples_per_group": 1},
        "reward": {"function": "fa_rollout.demo.task:sorting_reward"},
        "engine": {
            "urls": [engine.read_text() if engine.exists() else "http://127.0.0.1:9"],
            "tokenizer": str(model),
        },
        "ring": {"bytes": "1MiB"},
        "run": {"grace_s": 3, "spare_generator": False},
    }
    (folder / "run.toml").write_text(to_toml(merged(tree, changes)))


def serve(folder: Path, engine: ScriptedEngine) -> None:
    """The engine of the runs that are written to this folder."""
    as_started(engine)
    (folder / "engine").write_text(engine.url)


class Launch:
    """A launcher in a process of its own, and everything below it."""

    def __init__(self, folder: Path, *command: str, output: Path | None = None) -> None:
        """`output`: where both streams go; None: to files that `stdout` and `stderr` read."""
        self.folder = folder
        base = folder / "tmp"
        base.mkdir(exist_ok=True)
        self.base = base
        words = ["run", str(folder / "run.toml"), *(["--", *command] if command else [])]
        with (
            (output or folder / "stdout").open("w") as stdout,
            (output or folder / "stderr").open("w") as stderr,
        ):
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fa_rollout.cli", *words],
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, "TMPDIR": str(base), "XDG_RUNTIME_DIR": "", "OUT": str(folder)},
                start_new_session=True,
                # A test run under nohup ignores SIGHUP, and so would its children.
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )
        self.seen: dict[int, psutil.Process] = {}

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    def look(self) -> None:
        """Remember who is below the launcher now."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        self.seen |= {process.pid: process for process in found}

    def until(self, condition: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.stderr
            assert self.process.poll() is None or condition(), self.stderr
            self.look()
            time.sleep(0.02)

    def up(self) -> "Launch":
        """Wait for the trainer."""
        self.until(lambda: (self.folder / "up").exists())
        self.look()
        return self

    def child(self, word: str) -> psutil.Process:
        """The process below the launcher with this word on its command line; of generators the one at work,
        which is older than its spare."""
        self.look()
        found = [p for p in self.seen.values() if word in words(p)]
        assert len(found) == 1 or word == "fa_rollout.generator", found
        return min(found, key=lambda process: process.create_time())

    def end(self, timeout_s: float = DEADLINE_S) -> int:
        """The exit code; whatever was seen below the launcher must be gone, and its folder with it."""
        self.until(lambda: self.process.poll() is not None, timeout_s)
        self.all_gone()
        return self.process.wait()

    def all_gone(self, timeout_s: float = 5.0) -> None:
        def left() -> list[psutil.Process]:
            return [p for p in self.seen.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

        deadline = time.monotonic() + timeout_s
        while left() or list(self.base.glob("fa_rollout-*")):
            assert time.monotonic() < deadline, (left(), list(self.base.iterdir()), self.stderr)
            time.sleep(0.02)

    def destroy(self) -> None:
        """After a test that failed: end all that is left."""
        self.look()
        self.process.kill()
        self.process.wait()
        for process in self.seen.values():
            if process.is_running():
                process.kill()
