"""The embedded engine of a run: started, watched, started again.

In: the configuration's engine section. Out: one address that stays the same. Invariant: nothing here blocks;
`look` is called by the launcher's loop and does what is due. A new life holds the model's first weights: the
generator sees that by its version label, loads the published ones again and repeats the lost requests.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from fa_rollout import config
from fa_rollout.engines.embedded.launch import engine_command
from fa_rollout.launcher.child import Child

START_DEADLINE_S = 180.0
MAX_RESTARTS = 3
_NUM_LAST_LINES = 15
_PIPE_BYTES = 4096


class EngineKeeper:
    """Keeps one embedded engine alive."""

    def __init__(self, engine: config.Engine, *, log: Path | None, say: Callable[[str], None]) -> None:
        self._config, self._log, self._say = engine, log, say
        self.url: str | None = None
        """None until it listens for the first time."""
        self.obituary: str | None = None
        """Why there will be no further life; None as long as there is hope."""
        self.child: Child | None = None
        self._ready_fd = -1
        self._line = b""
        self._port = 0
        self._num_restarts = 0
        self._deadline_s = 0.0
        self._start()

    @property
    def ready_fd(self) -> int:
        """Becomes readable when a starting engine listens or ends; -1 when none is starting."""
        return self._ready_fd

    def look(self) -> None:
        """Take note of a start or a death, and start again after a death."""
        if self.child is None or self.obituary is not None:
            return
        self._read_address()
        if self.child.exit_code is not None:
            self._mourn(f"ended with exit code {self.child.exit_code}")
        elif self._ready_fd >= 0 and time.monotonic() > self._deadline_s:
            self._mourn(f"did not listen within {START_DEADLINE_S:.0f} s")

    def terminate(self) -> None:
        """Ask it to end."""
        if self.child is not None:
            self.child.signal(signal.SIGTERM)

    def close(self) -> None:
        """End it by force if it still runs; idempotent."""
        if self.child is not None:
            self.child.end()
            self.child = None
        self._close_pipe()

    def _start(self) -> None:
        assert self._config.model is not None, "a configuration without urls and model is refused"
        self._ready_fd, write_fd = os.pipe()
        os.set_blocking(self._ready_fd, False)
        self._line, self._deadline_s = b"", time.monotonic() + START_DEADLINE_S
        command = engine_command(
            self._config.model,
            port=self._port,
            threads=self._config.num_threads,
            ready_fd=write_fd,
            options=["--max-running-requests", str(self._config.max_concurrent_samples)],
        )
        try:
            self.child = Child.start("engine", command, pass_fds=(write_fd,), log=self._log, own_session=True)
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
            self._close_pipe()

    def _mourn(self, how: str) -> None:
        self.close()
        if self.url is not None and self._num_restarts < MAX_RESTARTS:
            self._num_restarts += 1
            count = f"restart {self._num_restarts} of {MAX_RESTARTS}"
            self._say(f"the embedded engine {how}; {count} on the same port")
            self._start()
            return
        times = f" after {self._num_restarts} restarts" if self._num_restarts else ""
        self.obituary = f"the embedded engine {how}{times}{self._last_lines()}"

    def _last_lines(self) -> str:
        if self._log is None or not self._log.is_file():
            return ""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_NUM_LAST_LINES:]
        return "; its last lines:\n" + "\n".join(lines)

    def _close_pipe(self) -> None:
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1
