"""One life of the generator after the other: start by exec, watch, end.

A spare may stand ready: a process that has loaded all that a generator needs, and that gets to know by
`Resume` that it is one. It is begun when the generator at work is ready, and says nothing until then.

Invariant: the next life starts only after `waitpid` of the last one and after what it had sent is read, so
that two writers never share the ring.
"""

import os
import signal
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass

import msgspec

from fa_rollout.process.child import ChildProcess
from shm.channels.channel import Channel
from trainer_hook.messages import Resume, encode

START_LIMIT_S = 300.0
"""A generator that reads its data and looks for its engines may be silent for so long."""

GENERATOR = "fa_rollout.generator"

SPARE_AFTER_S = 1.0
"""From a generator's being ready to the start of its spare."""

RESTART_WINDOW_S = 600.0
"""Accidental ends are counted over this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """A process that has the preamble, and the hub's end of its channel."""

    process: ChildProcess
    channel: Channel
    begun_s: float

    def end(self) -> None:
        self.process.end()
        self.channel.close()


class GeneratorLife:
    """The generator process that runs now, its spare, and how often it had to be replaced."""

    def __init__(
        self,
        *,
        preamble: bytes,
        ring_fd: int,
        max_restarts: int,
        module: str = GENERATOR,
        has_spare: bool = False,
    ) -> None:
        """`module`: what is run by `python -m`."""
        self._module = module
        self._preamble = preamble
        self._ring_fd = ring_fd
        self._max_restarts = max_restarts
        self._process: ChildProcess | None = None
        self._begun_s = 0.0
        """When the process began, which may have been a spare for long."""
        self._ends: deque[float] = deque()
        self._has_spare = has_spare
        self._spare: _Started | None = None
        self._spare_due_s: float | None = None
        self.channel: Channel | None = None
        self.last_heard_s = 0.0
        self.is_ready = False
        self.is_drained = False
        """All that this life sent was read."""
        self.num_restarts = 0
        self.next_start_s: float | None = None
        """When the next life begins; None while one is running or none is wanted."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def pidfd(self) -> int | None:
        return self._process.pidfd if self._process else None

    def start(self, resume: Resume) -> Channel:
        """Begin a life: the spare's where one stands ready, else a fresh one."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.process.status is not None:
            spare.end()
            spare = None
        started = spare or self._spawn()
        self._process, self.channel, self._begun_s = started.process, started.channel, started.begun_s
        self.channel.queue(encode(resume))
        self.last_heard_s = time.monotonic()
        self.next_start_s = self._spare_due_s = None
        self.is_ready = self.is_drained = False
        return self.channel

    def keep_spare(self, now_s: float) -> None:
        """Begin a spare when it is time; one that has failed is left at that until the next life."""
        if not self._has_spare or not self.is_ready or self._spare is not None:
            return
        if self._spare_due_s is None:
            self._spare_due_s = now_s + SPARE_AFTER_S
        elif now_s >= self._spare_due_s:
            self._spare = self._spawn()

    def dismiss_spare(self) -> None:
        """No further life is wanted."""
        self._has_spare = False
        if self._spare is not None:
            self._spare.end()
            self._spare = None

    def _spawn(self) -> _Started:
        """A fresh interpreter in a session of its own, with ring and channel inherited."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [
            *(sys.executable, "-m", self._module),
            *(
                "--channel-fd",
                str(theirs.fileno()),
                "--ring-fd",
                str(self._ring_fd),
                "--parent-pid",
                str(os.getpid()),
            ),
        ]
        with theirs:
            process = ChildProcess(command, pass_fds=(theirs.fileno(), self._ring_fd))
        channel = Channel(ours)
        channel.queue(self._preamble)
        channel.flush()
        return _Started(process=process, channel=channel, begun_s=time.monotonic())

    def heard(self, *, is_ready: bool) -> None:
        """It spoke; `is_ready` when that was to say that it is ready."""
        self.last_heard_s = time.monotonic()
        self.is_ready |= is_ready

    def is_silent(self, now_s: float, limit_s: float) -> bool:
        """Whether it is alive and has said nothing for too long; one that may still load gets more time."""
        has_loaded = self.is_ready or now_s - self._begun_s > START_LIMIT_S
        return has_loaded and now_s - self.last_heard_s > limit_s

    def kill(self) -> None:
        """End it at once: it does not answer."""
        if self._process is not None:
            self._process.kill()

    def reap(self) -> str:
        """Close the books of a life that has ended; says how it ended."""
        assert self._process is not None
        code = self._process.wait()
        assert code is not None, "waited for without a timeout"
        self._process.close()
        if self.channel is not None:
            self.channel.close()
        self._process, self.channel, self.is_ready = None, None, False
        return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"

    def plan_restart(self, now_s: float) -> bool:
        """Set the time of the next life; False when too many ended by accident lately.

        The first replacement starts at once, later ones wait 0.5 s, 1 s, 2 s and so on.
        """
        while self._ends and now_s - self._ends[0] > RESTART_WINDOW_S:
            self._ends.popleft()
        self._ends.append(now_s)
        num_recent = len(self._ends)
        if num_recent > self._max_restarts:
            return False
        self.num_restarts += 1
        self.next_start_s = now_s + (0.0 if num_recent == 1 else min(0.5 * 2 ** (num_recent - 2), 10.0))
        return True


def preamble(run: str, tree: dict[str, object]) -> bytes:
    """First frame to a generator: the run's id and the configuration, as JSON."""
    return msgspec.json.encode({"run": run, "config": tree})
