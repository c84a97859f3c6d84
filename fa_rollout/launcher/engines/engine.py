"""One server of a run (an engine, or the router): started, watched, restarted.

In: the program. Out: an address that never changes. Invariant: nothing here blocks; the launcher's loop calls
`look`. A restarted engine has the model's initial weights: the generator sees that by its version label,
loads the published weights again and repeats the lost requests.
"""

import contextlib
import json
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from fa_rollout.engines.service import free_port
from fa_rollout.launcher.children.child import Child
from fa_rollout.launcher.children.relay import Relay
from fa_rollout.launcher.engines.program import ServerProgram
from trainer_hook.printable import printable

RESTART_WINDOW_S = 3600.0
"""Exits are counted over this time."""
_NUM_LAST_LINES = 15
_PIPE_BYTES = 4096


class EngineKeeper:
    """Runs one server and restarts it if it dies."""

    def __init__(
        self,
        program: ServerProgram,
        *,
        start_limit_s: float,
        max_restarts: int,
        log: Path | None,
        say: Callable[[str], None],
    ) -> None:
        self._program, self._log, self._say = program, log, say
        self._start_limit_s, self._max_restarts = start_limit_s, max_restarts
        self.url: str | None = None
        """None until it listens for the first time."""
        self.is_up = False
        """Whether it listens, as of the last `look`."""
        self.failure: str | None = None
        """Why it is not restarted; None while it runs or restarts."""
        self.child: Child | None = None
        self._ready_fd = -1
        self._line = b""
        self._port = 0
        self._ends_s: deque[float] = deque()
        self._deadline_s = 0.0
        self._start()

    def register(self, poll: "select.poll") -> None:
        """Have a poll return when it listens, or exits."""
        if self._ready_fd >= 0:
            poll.register(self._ready_fd, select.POLLIN)
        if self.child is not None and self.child.pidfd is not None and self.child.exit_code is None:
            poll.register(self.child.pidfd, select.POLLIN)

    def look(self) -> None:
        """Check whether it listens or has exited, and restart it after an exit."""
        if self.child is None or self.failure is not None:
            return
        self._read_address()
        if self.child.exit_code is not None:
            self._handle_exit(f"exited with code {self.child.exit_code}")
        elif self._ready_fd >= 0 and time.monotonic() > self._deadline_s:
            self._handle_exit(f"did not listen within {self._start_limit_s:.0f} s")

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self.child is not None:
            self.child.signal(signal.SIGTERM)

    def close(self) -> None:
        """Kill it if it still runs; idempotent."""
        self.is_up = False
        if self.child is not None:
            self.child.end()
            self.child = None
        self._close_pipe()

    def _start(self) -> None:
        if not self._port and not self._program.picks_port:
            self._port = free_port()
        self._ready_fd, write_fd = os.pipe()
        os.set_blocking(self._ready_fd, False)
        self._line, self._deadline_s = b"", time.monotonic() + self._start_limit_s
        command = self._program.words(self._port, write_fd)
        environment = self._program.environment
        try:
            self.child = Child(
                self._program.name,
                command,
                environment=environment,
                pass_fds=(write_fd,),
                log=self._log,
                own_session=True,
                relay=Relay() if self._log is None else None,
            )
        finally:
            os.close(write_fd)

    def _read_address(self) -> None:
        if self._ready_fd < 0:
            return
        with contextlib.suppress(BlockingIOError):
            self._line += os.read(self._ready_fd, _PIPE_BYTES)
        if self._line.endswith(b"\n"):
            ready = json.loads(self._line)
            self.url, self._port = ready["url"], ready["port"]
            self.is_up = True
            self._close_pipe()

    def _handle_exit(self, how: str) -> None:
        self.close()
        if self.url is not None and self._may_restart():
            count = f"restart {len(self._ends_s)} of {self._max_restarts}"
            self._say(f"{self._program.name} {how}; {count} on the same port")
            self._start()
            return
        times = f" after {self._max_restarts} restarts" if self.url is not None else ""
        self.failure = f"{self._program.name} {how}{times}{self._last_lines()}"

    def _may_restart(self) -> bool:
        now_s = time.monotonic()
        while self._ends_s and now_s - self._ends_s[0] > RESTART_WINDOW_S:
            self._ends_s.popleft()
        self._ends_s.append(now_s)
        return len(self._ends_s) <= self._max_restarts

    def _last_lines(self) -> str:
        if self._log is None or not self._log.is_file():
            return ""
        lines = (
            self._log.read_text(encoding="utf-8", errors="replace").rstrip().split("\n")[-_NUM_LAST_LINES:]
        )
        return "; its last lines:\n" + "\n".join(f"  {printable(line)}" for line in lines)

    def _close_pipe(self) -> None:
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1
