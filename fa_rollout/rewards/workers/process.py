"""A reward worker, with its nurse, as its runner sees it: started, fed, read, taken back from, killed.

The runner keeps the worker's end of the connection open too, so that it can take back what the worker has
not begun: a slow reward never holds those behind it. That leaves no end-of-file to tell of a death, so `died`
asks the kernel.
"""

import os
import re
import signal
import sys
import time
from dataclasses import dataclass

from fa_rollout.process.child import ChildProcess
from fa_rollout.rewards.workers import answers, wire
from fa_rollout.rewards.workers.protocol import WorkerSetup
from fa_rollout.user_code.place import CodePlace, innermost

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
"""Of faulthandler, the innermost first."""
_MAX_WORDS = 1 << 16
_PATIENCE_S = 6.0
"""Longer than a nurse takes to end what is below it."""
_OF_THE_RUN = frozenset(
    f"FA_ROLLOUT_{name}" for name in ("ADDRESS", "RUN", "TOKEN", "ENGINE_KEY", "REWARD_KEY")
)
"""Variables that command a run, its engines or its reward server: a reward has no use for them."""


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker ended by itself."""

    text: str
    by_signal: bool = False
    """Killed from outside (out of memory), or crashed."""


class WorkerProcess:
    """One live worker, in a session and process group of its own."""

    def __init__(self, setup: WorkerSetup) -> None:
        """Start a fresh interpreter; it answers `Ready` or `Refused` under ticket 0.

        Raises:
            OSError: no process can be started.
        """
        self.channel, self._workers_end = wire.pair()
        self.channel.setblocking(False)
        lifeline, self._lifeline = os.pipe()
        self._words = os.memfd_create("reward-words", os.MFD_CLOEXEC)
        self._killed_s: float | None = None
        try:
            self._process = self._start(lifeline)
        except OSError:
            self._close_descriptors()
            raise
        finally:
            os.close(lifeline)
        self.send(0, wire.dump(setup))

    def _start(self, lifeline: int) -> ChildProcess:
        command = [sys.executable, "-m", "fa_rollout.rewards.workers.nurse", "--words-fd", str(self._words)]
        command += ["--channel-fd", str(self._workers_end.fileno()), "--lifeline-fd", str(lifeline)]
        return ChildProcess(
            [*command, "--parent-pid", str(os.getpid())],
            environment={name: value for name, value in os.environ.items() if name not in _OF_THE_RUN},
            pass_fds=(self._workers_end.fileno(), lifeline, self._words),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, ticket: int, payload: bytes) -> bool:
        """Hand over an item; False when the connection's buffer has no room for it now."""
        try:
            wire.send(self.channel, ticket, payload)
        except BlockingIOError:
            return False
        return True

    def receive(self) -> list[tuple[int, answers.Answer]]:
        """All answers that have arrived, oldest first; a worker that sends something else is killed."""
        found: list[tuple[int, answers.Answer]] = []
        while True:
            try:
                message = wire.receive(self.channel)
            except BlockingIOError:
                return found
            assert message is not None, "this process holds both ends"
            try:
                found.append((message[0], answers.decode(message[1])))
            except answers.BadAnswer:  # whatever runs there is not the worker any more
                self.kill()
                return found

    def take_back(self) -> list[int]:
        """Tickets of the items that the worker has not begun, and now never will."""
        return wire.take_back(self._workers_end)

    def died(self) -> Death | None:
        """How the worker ended by itself; None while it lives. Leaves it unreaped, for `kill`."""
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return Death("an unknown end: this process ignores SIGCHLD")
        if ended is None:
            return None
        if ended.si_code == os.CLD_EXITED:
            return Death(f"exit code {ended.si_status}")
        name = signal.strsignal(ended.si_status)
        return Death(f"signal {ended.si_status} ({name})", by_signal=True)

    def kill(self) -> None:
        """End the worker and all that it started; `reaped` tells when it is gone."""
        self._killed_s = time.monotonic()
        self._process.signal(signal.SIGTERM)

    def reaped(self) -> bool:
        """Whether the killed worker is gone from the process table."""
        if self._process.status is not None:
            return True
        if self._killed_s is not None and time.monotonic() > self._killed_s + _PATIENCE_S:
            self._process.kill()  # the kernel then kills the worker
        return False

    def last_place(self) -> CodePlace | None:
        """Where the worker was when it was killed."""
        words = os.pread(self._words, _MAX_WORDS, 0).decode(errors="replace")
        frames = [CodePlace(file, int(line), name) for file, line, name in _FRAME.findall(words)]
        return innermost(reversed(frames))

    def close(self) -> None:
        """Close the connection; answers that were not read are lost."""
        self._process.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self.channel.close()
        self._workers_end.close()
        os.close(self._lifeline)
        os.close(self._words)
