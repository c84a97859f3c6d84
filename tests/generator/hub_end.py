"""The hub's end of a real generator process: channel, ring table and reader, driven by a test."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

from fa_rollout.engines.tiny_model import BOS_ID, write_tiny_model
from shm import Descriptor, RingReader, RingTable
from shm.channels.channel import Channel
from shm.errors import ChannelClosed, ChannelTimeout
from shm.ring.segment import Segment
from trainer_hook import messages as m
from trainer_hook.record import COLUMNS, RecordHead, run_number, schema_fingerprint

ROOT = Path(__file__).parents[2]
RUN = "run-of-the-test"
LINEAGE = "abcd"
CHARACTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"
VOCAB_SIZE = 3 + len(CHARACTERS)

M = TypeVar("M", bound=m.Message)


def write_model(folder: Path) -> Path:
    """A tokenizer of single characters, with a model that nobody runs."""
    return write_tiny_model(folder / "model", characters=CHARACTERS, hidden=8, layers=1, heads=1)


def write_prompts(path: Path, num_prompts: int = 20) -> Path:
    """Prompts of 27 characters that differ from the start on: more than makes a scripted sequence's key."""
    rows = [{"prompt": f"{i:04d} is this prompts number", "label": i} for i in range(num_prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text_ids(text: str) -> np.ndarray:
    """Ids of a piece of text."""
    return np.array([3 + CHARACTERS.index(character) for character in text], np.int32)


def prompt_ids(index: int) -> np.ndarray:
    """Ids of a prompt of `write_prompts`, the tokenizer's first token included."""
    return np.concatenate([np.array([BOS_ID], np.int32), text_ids(f"{index:04d} is this prompts number")])


def run_tree(folder: Path, url: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A configuration with two samples a group and a reward in the loop; sections update it."""
    data = folder / "prompts.jsonl"
    tree: dict[str, Any] = {
        "data": {"path": str(data if data.exists() else write_prompts(data))},
        "rollout": {"num_steps": 10, "groups_per_step": 4, "samples_per_group": 2},
        "reward": {"function": "tests.generator.user_code.response_length", "in_loop": True},
        "sampling": {"max_new_tokens": 32},
        "engine": {"urls": [url], "tokenizer": str(write_model(folder)), "max_concurrent_samples": 64},
        "run": {"grace_s": 3.0},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return tree


class Group:
    """A committed record, as a trainer would read it."""

    def __init__(self, commit: m.Commit, head: RecordHead, arrays: dict[str, np.ndarray]) -> None:
        self.commit = commit
        self.head = head
        self.arrays = arrays

    def tokens(self, member: int) -> np.ndarray:
        """[T] prompt and response."""
        start, end = self.arrays["cu_seqlens"][member : member + 2]
        return self.arrays["tokens"][start:end]

    def response(self, member: int) -> np.ndarray:
        """[R]"""
        return self.tokens(member)[self.commit.prompt_lens[member] :]

    def column(self, name: str, member: int) -> np.ndarray:
        """[R] `logprobs` or `loss_mask` of one sample."""
        start, end = self.arrays["cu_responses"][member : member + 2]
        return self.arrays[name][start:end]

    def spans(self, member: int) -> list[tuple[int, int]]:
        """(version, end) of one sample."""
        start, end = self.arrays["cu_spans"][member : member + 2]
        pairs = zip(self.arrays["span_versions"][start:end], self.arrays["span_ends"][start:end], strict=True)
        return [(int(version), int(end)) for version, end in pairs]


class HubEnd:
    """Starts a generator, talks to it, and keeps all that it says."""

    def __init__(
        self,
        tree: dict[str, Any],
        *,
        ring_bytes: int = 1 << 20,
        version: int = 0,
        weights: str | None = None,
    ) -> None:
        self.segment = Segment.create(ring_bytes)
        self.table = RingTable(ring_bytes)
        self.reader = RingReader(self.segment, run=run_number(RUN), schema=schema_fingerprint())
        self.tree = tree
        self.version = version
        self.weights = weights
        self.in_stream = False
        self.said: list[m.Message] = []
        self.start()

    def restart(self) -> None:
        """Kill the generator and begin its next life, as the hub does: what it sent counts."""
        self.process.kill()
        self.exit_code()
        self.channel.close()
        self.start()

    def start(self) -> None:
        """Begin a life of the generator."""
        head, sequence = self.table.restart()
        ours, theirs = socket.socketpair()
        arguments = (
            "--channel-fd",
            theirs.fileno(),
            "--ring-fd",
            self.segment.fd,
            "--parent-pid",
            os.getpid(),
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fa_rollout.generator", *map(str, arguments)],
                pass_fds=(theirs.fileno(), self.segment.fd),
                start_new_session=True,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
            )
        self.channel = Channel(ours)
        self.channel.send(msgspec.json.encode({"run": RUN, "config": self.tree}))
        self.send(
            m.Resume(
                incarnation=self.table.incarnation,
                head=head,
                tail=self.table.tail,
                sequence=sequence,
                version=self.version,
                lineage=LINEAGE,
                weights=self.weights,
                in_stream=self.in_stream,
            )
        )

    def send(self, message: m.Message) -> None:
        self.channel.send(m.encode(message))

    def issue(self, *groups: int, attempt: int = 0) -> None:
        """Give groups out; the prompt is the one of the group's number."""
        self.send(
            m.Start(groups=[m.Assignment(group=g, attempt=attempt, epoch=0, prompt_index=g) for g in groups])
        )

    def listen(self, timeout_s: float = 0.05) -> m.Message | None:
        """The next message, kept in `said`; None when none comes. Commits enter the table."""
        try:
            message = m.decode(self.channel.receive(timeout_s))
        except ChannelTimeout:
            return None
        self.said.append(message)
        if isinstance(message, m.Commit):
            descriptor = Descriptor(message.incarnation, message.sequence, message.position, message.length)
            self.table.admit(descriptor, message.lowest_open)
        return message

    def until(self, done: Callable[[], Any], timeout_s: float = 15.0) -> None:
        """Listen until `done()`."""
        deadline_s = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline_s, (
                f"it must come within {timeout_s} s, said so far: {self.said}"
            )
            self.listen()

    def all(self, kind: type[M]) -> list[M]:
        """What it has said of one kind."""
        return [message for message in self.said if isinstance(message, kind)]

    def wait_for(self, kind: type[M], count: int = 1, timeout_s: float = 15.0) -> list[M]:
        """All messages of one kind, once there are `count`."""
        self.until(lambda: len(self.all(kind)) >= count, timeout_s)
        return self.all(kind)

    def answers(self, count: int, timeout_s: float = 15.0) -> dict[int, m.Commit | m.Settled]:
        """Commits and settlements by group, once there are `count`; none may come twice."""

        def found() -> list[m.Commit | m.Settled]:
            return [*self.all(m.Commit), *self.all(m.Settled)]

        self.until(lambda: len(found()) >= count, timeout_s)
        by_key = {(answer.group, answer.attempt): answer for answer in found()}
        assert len(by_key) == len(found()), "a group was answered twice"
        return {group: answer for (group, _), answer in by_key.items()}

    def read(self, commit: m.Commit) -> Group:
        """The record of a commit, copied out of the ring."""
        descriptor = Descriptor(commit.incarnation, commit.sequence, commit.position, commit.length)
        record = self.reader.open(descriptor, copy=True)
        names = [column.name for column in COLUMNS]
        head = msgspec.msgpack.decode(record.head, type=RecordHead)
        return Group(commit, head, dict(zip(names, record.arrays, strict=True)))

    def free(self, commit: m.Commit) -> None:
        """The trainer is done with a record."""
        self.table.retire(commit.sequence)
        self.send(m.Tail(position=self.table.tail))

    def exit_code(self, timeout_s: float = 10.0) -> int:
        """How the process ended, all that it said kept before."""
        code = self.process.wait(timeout_s)
        try:
            while self.listen(0.2) is not None:
                pass
        except ChannelClosed:
            pass
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.channel.close()
        self.segment.close()
