"""The worker processes, as the generator sees them: sessions go to the one with the fewest.

| a worker | its sessions |
|---|---|
| dies | start anew in another one; a second death fails them |
| retires, since an agent ignored its end | continue; it ends with the last, and another takes its place |
| does not answer a cancellation within `ANSWER_S` | as if it died, the cancelled one aside |

Invariant: every session that began ends once, with `Ended`.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fa_rollout.agents import frames
from fa_rollout.agents.frames import Begin, Cancel, Ended, Ready, Refused, Retiring, Setup
from fa_rollout.config import ConfigError
from fa_rollout.process.own_threads import in_thread
from fa_rollout.user_code.place import CodePlace, innermost

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
_START_S = 180.0
_MAX_DEATHS = 2
_MAX_FAILED_STARTS = 3
_KILL_S = 6.0
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_OF_THE_RUN = frozenset(
    f"FA_ROLLOUT_{name}" for name in ("ADDRESS", "RUN", "TOKEN", "ENGINE_KEY", "REWARD_KEY")
)


@dataclass(slots=True, eq=False)
class Running:
    """A session that was handed over."""

    ticket: int
    begin: Callable[[int], Begin]
    """A fresh start under this ticket."""
    ended: "asyncio.Future[Ended]"
    worker: "_Worker | None" = None
    num_deaths: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    process: "subprocess.Popen[bytes]"
    writer: asyncio.StreamWriter
    lifeline: int
    words: int
    sessions: dict[int, Running] = field(default_factory=dict)
    gone: "asyncio.Future[CodePlace | None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Where it was when it ended."""
    is_ready: bool = False
    is_retiring: bool = False

    def send(self, message: Any) -> None:
        self.writer.write(frames.down(message))

    def place(self) -> CodePlace | None:
        """Where it was when it was told to end."""
        words = os.pread(self.words, 1 << 16, 0).decode(errors="replace")
        return innermost(reversed([CodePlace(f, int(n), name) for f, n, name in _FRAME.findall(words)]))


class AgentWorkers:
    """All of them."""

    def __init__(self, setup: Setup, num_workers: int) -> None:
        self._setup, self._num_workers = setup, num_workers
        self._workers: list[_Worker] = []
        self._tickets = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._num_failed_starts = 0
        self._is_closed = False
        self.refusal: str | None = None

    async def start(self) -> None:
        """Start the workers; returns once one of them can work.

        Raises:
            ConfigError: the agent cannot be loaded, or no worker starts.
        """
        for _ in range(self._num_workers):
            self._spawn()
        async with asyncio.timeout(_START_S):
            await self._ready()

    async def begin(self, make: Callable[[int], Begin]) -> Running:
        """Hand a session over.

        Raises:
            ConfigError: there are no workers, and none can be started.
        """
        running = Running(next(self._tickets), make, asyncio.get_running_loop().create_future())
        await self._hand_over(running)
        return running

    async def cancel(self, running: Running) -> str | None:
        """End a session; where it was, as far as that is known."""
        worker = running.worker
        if running.ended.done() or worker is None:
            return None
        worker.send(Cancel(running.ticket))
        await asyncio.wait({running.ended}, timeout=ANSWER_S)
        if running.ended.done():
            return running.ended.result().at
        worker.sessions.pop(running.ticket, None)
        worker.process.send_signal(signal.SIGTERM)
        await asyncio.wait({worker.gone}, timeout=2 * _KILL_S)
        at = worker.gone.result() if worker.gone.done() else None
        running.ended.set_result(Ended(ticket=running.ticket, failure="its worker was ended"))
        return None if at is None else str(at)

    def cancel_soon(self, running: Running) -> None:
        """End a session that nobody waits for any more."""
        task = asyncio.get_running_loop().create_task(self._cancelled(running))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _cancelled(self, running: Running) -> None:
        await self.cancel(running)

    async def aclose(self) -> None:
        """End every worker and all that it started. Idempotent."""
        self._is_closed = True
        for worker in self._workers:
            worker.process.send_signal(signal.SIGTERM)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_KILL_S)

    @property
    def num_sessions(self) -> int:
        return sum(len(worker.sessions) for worker in self._workers)

    # --- inside -----------------------------------------------------------------------------------

    async def _ready(self) -> list[_Worker]:
        while True:
            if self.refusal is not None:
                raise ConfigError(self.refusal)
            if found := [one for one in self._workers if one.is_ready and not one.is_retiring]:
                return found
            self._changed.clear()
            await self._changed.wait()

    async def _hand_over(self, running: Running) -> None:
        workers = await self._ready()
        worker = min(workers, key=lambda one: len(one.sessions))
        worker.send(running.begin(running.ticket))
        worker.sessions[running.ticket] = running
        running.worker = worker

    def _spawn(self) -> None:
        task = asyncio.get_running_loop().create_task(self._live(), name="agent-worker")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self) -> None:
        """One worker from its start to its end."""
        ours, theirs = socket.socketpair()
        lifeline, alive = os.pipe()
        words = os.memfd_create("agent-words", os.MFD_CLOEXEC)
        with theirs:
            process = _process(theirs.fileno(), lifeline, words)
        os.close(lifeline)
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = _Worker(process, writer, alive, words)
        self._workers.append(worker)
        worker.send(self._setup)
        try:
            while True:
                self._handle(worker, await frames.read_up(reader))
        except (EOFError, ConnectionError):
            pass
        except msgspec.MsgspecError:
            logger.warning("event=agent_worker_confused pid=%d", process.pid)
        finally:
            self._workers.remove(worker)
            await in_thread(_wait, process)
            os.close(alive)  # a nurse that is still there ends what is left
            writer.close()
            await in_thread(process.wait)
            worker.gone.set_result(worker.place())
            os.close(words)
        self._buried(worker, process.returncode)

    def _handle(self, worker: _Worker, message: frames.Up) -> None:
        match message:
            case Ready():
                worker.is_ready, self._num_failed_starts = True, 0
            case Refused(text):
                self.refusal = text
            case Retiring():
                if not worker.is_retiring:
                    worker.is_retiring = True
                    self._spawn()
            case Ended(ticket=ticket):
                running = worker.sessions.pop(ticket, None)
                if running is not None and not running.ended.done():
                    running.ended.set_result(message)
        if worker.is_retiring and not worker.sessions:
            worker.process.send_signal(signal.SIGTERM)
        self._changed.set()

    def _buried(self, worker: _Worker, code: int) -> None:
        """A worker is gone: another takes its place, and its sessions."""
        lost, worker.sessions = list(worker.sessions.values()), {}
        if not worker.is_ready and self.refusal is None:
            self._num_failed_starts += 1
            if self._num_failed_starts >= _MAX_FAILED_STARTS:
                self.refusal = f"agent workers do not start: the last ended with code {code}; see its output"
        if not self._is_closed and self.refusal is None and not worker.is_retiring:
            self._spawn()
        self._changed.set()
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        for running in lost:
            running.num_deaths += 1
            if self._is_closed or self.refusal is not None or running.num_deaths >= _MAX_DEATHS:
                text = f"its worker process died {running.num_deaths} times, the last time with {cause}"
                if not running.ended.done():
                    running.ended.set_result(Ended(ticket=running.ticket, failure=text))
                continue
            task = asyncio.get_running_loop().create_task(self._hand_over(running))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


def _wait(process: "subprocess.Popen[bytes]") -> None:
    """Give it the time to end by itself, so that its exit status tells why."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_S)


def _process(channel_fd: int, lifeline: int, words: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "fa_rollout.rewards.workers.nurse", "--words-fd", str(words)]
    command += ["--channel-fd", str(channel_fd), "--lifeline-fd", str(lifeline)]
    command += ["--module", "fa_rollout.agents.worker", "--parent-pid", str(os.getpid())]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name not in _OF_THE_RUN},
        pass_fds=(channel_fd, lifeline, words),
        start_new_session=True,
    )
