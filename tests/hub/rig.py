"""A real run for tests: hub process, its generator, a scripted engine; ranks are made by the test."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import psutil

from fa_rollout.engines.tiny_model import write_tiny_model
from shm.channels.channel import Channel
from shm.errors import ChannelClosed
from tests.client.client_kit import as_started
from tests.kit.scripted import ScriptedEngine
from trainer_hook import TrainerHook
from trainer_hook import messages as m

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz ="
VOCAB_SIZE = 3 + len(CHARACTERS)
NUM_PROMPTS = 11
WITH_SPARE = {"spare_generator": True}
"""Of `[run]`, for a test in which the generator dies: others do without a second process."""


def merged(tree: dict[str, Any], changes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: tree.get(name, {}) | changes.get(name, {}) for name in [*tree, *changes]}


def words(process: psutil.Process) -> list[str]:
    """Its command line; none where it has ended, waited for or not."""
    try:
        return process.cmdline() if process.is_running() else []
    except psutil.NoSuchProcess:
        return []


class Rig:
    """One run of the hub; `with` ends it and checks that nothing of it is left."""

    def __init__(self, folder: Path, engine: ScriptedEngine, /, **changes: dict[str, Any]) -> None:
        self.folder = folder
        self.engine = engine
        as_started(engine)
        folder.mkdir(parents=True, exist_ok=True)
        write_tiny_model(folder / "model", characters=CHARACTERS)
        rows = [json.dumps({"prompt": f"prompt {i}", "label": str(i)}) for i in range(NUM_PROMPTS)]
        (folder / "prompts.jsonl").write_text("\n".join(rows))
        self.config = merged(self._plain(), changes)
        self.run_id, self.token = secrets.token_hex(8), secrets.token_hex(16)
        self.last_words: m.RunEnded | None = None
        self.notices: list[str] = []
        self.progress: list[str] = []
        self.is_open = False
        self._hooks: list[TrainerHook] = []

    def _plain(self) -> dict[str, Any]:
        return {
            "data": {"path": str(self.folder / "prompts.jsonl"), "seed": 5},
            "rollout": {"num_steps": 6, "groups_per_step": 4, "samples_per_group": 2, "staleness": 2},
            "sampling": {"max_new_tokens": 256},
            "reward": {"function": "tests.hub.user_code.length_reward", "in_loop": True},
            "engine": {"urls": [self.engine.url], "tokenizer": str(self.folder / "model")},
            "ring": {"bytes": 1 << 20, "poison": True, "checksum_payload": True},
            "run": {"output_dir": str(self.folder), "grace_s": 3, "spare_generator": False},
            "trainer": {"stall_s": 20},
        }

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "fa_rollout.hub", "--channel-fd", str(theirs.fileno())]
        command += ["--parent-pid", str(os.getpid()), "--directory", str(self.folder / "private")]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), start_new_session=True)
        self.channel = Channel(ours)
        first = {"run": self.run_id, "token": self.token, "config": self.config}
        self.channel.send(msgspec.json.encode(first))
        ready = self.hear()
        assert isinstance(ready, m.HubReady), ready
        self.address = ready.address
        return self

    def hear(self, timeout_s: float = 20.0) -> m.Message:
        """The next message to the launcher beside notices, progress lines, and that the run is open."""
        while True:
            message = m.decode(self.channel.receive(timeout_s))
            match message:
                case m.Notice():
                    self.notices.append(message.text)
                case m.Progress():
                    self.progress.append(message.text)
                case m.RunOpened():
                    self.is_open = True
                case _:
                    return message

    def attach(self, rank: int = 0, size: int = 1, *, peer: int = 0, num_peers: int = 1) -> TrainerHook:
        hook = TrainerHook.attach(
            address=self.address,
            run=self.run_id,
            token=self.token,
            dp_rank=rank,
            dp_size=size,
            peer=peer,
            num_peers=num_peers,
            timeout_s=20,
        )
        self._hooks.append(hook)
        return hook

    @property
    def environment(self) -> dict[str, str]:
        """What a trainer process needs."""
        return os.environ | {
            "FA_ROLLOUT_ADDRESS": self.address,
            "FA_ROLLOUT_RUN": self.run_id,
            "FA_ROLLOUT_TOKEN": self.token,
        }

    def generator(self) -> psutil.Process:
        """The generator at work; its spare is younger."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found[:] = [
                child
                for child in psutil.Process(self.process.pid).children()
                if "fa_rollout.generator" in words(child)
            ]
            return bool(found)

        self.until(look)
        return min(found, key=lambda process: process.create_time())

    def until(self, condition: Callable[[], object], timeout_s: float = 20.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, "the condition did not come true"
            time.sleep(0.02)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of the log so far; the hub writes them once a second."""
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def stop(self) -> m.RunEnded:
        """All ranks made here leave, since the hub would wait for them; then it ends. Its last words."""
        for hook in self._hooks:
            hook.close()
        if self.last_words is None:
            self.channel.send(m.encode(m.Stop(grace_s=3.0, reason="the test is over")))
            message = self.hear()
            assert isinstance(message, m.RunEnded), message
            self.last_words = message
        return self.last_words

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        family = [self.process.pid, *(child.pid for child in self._children())]
        if kind is None and self.process.poll() is None:
            try:
                self.stop()
            except ChannelClosed:
                assert self.process.wait(5) is not None
        if kind is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self.channel.close()
        self.until(lambda: not any(psutil.pid_exists(pid) for pid in family), timeout_s=5)

    def _children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def add_up(counts: dict[str, int]) -> bool:
    """Whether every prompt taken is in exactly one place."""
    return counts["taken"] == sum(number for name, number in counts.items() if name != "taken")
