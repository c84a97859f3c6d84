"""A handle on an embedded engine in a process of its own: start, address, stop.

The process is an exec of a fresh interpreter in its own session. It watches its parent, so that it ends
with it however that comes about; an error at the start carries the last lines that it wrote.
"""

import json
import os
import select
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from fa_rollout.engines.embedded.errors import EngineStartError
from fa_rollout.engines.embedded.launch import engine_command
from fa_rollout.process.child import ChildProcess

_NUM_LAST_LINES = 20
_ROOT = Path(__file__).parents[2]


class EmbeddedEngine:
    """A running server. Close it with `stop`, or use it as a context manager."""

    def __init__(self, process: ChildProcess, log: IO[bytes], ready: dict[str, Any]) -> None:
        self.process = process
        self.url: str = ready["url"]
        self.host: str = ready["host"]
        self.port: int = ready["port"]
        self.pid = process.pid
        self._log = log

    @classmethod
    def start(
        cls,
        model_dir: str | Path,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        threads: int = 1,
        log_path: str | Path | None = None,
        weight_version: str = "default",
        options: Sequence[str] = (),
        timeout_s: float = 120.0,
    ) -> "EmbeddedEngine":
        """Start a server and wait until it listens; raises EngineStartError.

        `options` are further arguments of `python -m fa_rollout.engines.embedded`.
        """
        log: IO[bytes] = tempfile.TemporaryFile() if log_path is None else open(log_path, "a+b")  # noqa: SIM115
        ready_read, ready_write = os.pipe()
        options = ["--host", host, "--weight-version", weight_version, *options]
        command = engine_command(model_dir, port=port, threads=threads, ready_fd=ready_write, options=options)
        try:
            process = ChildProcess(
                command, stdout=log, stderr=log, pass_fds=[ready_write], environment=_environment()
            )
            os.close(ready_write)
            ready = _await_ready(process, ready_read, log, timeout_s)
        except BaseException:
            log.close()
            raise
        finally:
            os.close(ready_read)
        return cls(process, log, ready)

    @property
    def is_alive(self) -> bool:
        return self.process.status is None

    @property
    def pidfd(self) -> int | None:
        """Readable at its end."""
        return self.process.pidfd

    def last_lines(self) -> str:
        """The end of what the server wrote."""
        return _last_lines(self._log)

    def stop(self, grace_s: float = 5.0) -> int | None:
        """End the server, by force after `grace_s`; its exit status. May be called twice."""
        status = self.process.stop(grace_s)
        self._log.close()
        return status

    def __enter__(self) -> "EmbeddedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _environment() -> dict[str, str]:
    """Ours, with this package importable; offline, and no threads in the tokenizer."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def _await_ready(process: ChildProcess, ready_fd: int, log: IO[bytes], timeout_s: float) -> dict[str, Any]:
    """The line that the server writes when it listens; EOF means that it died."""
    deadline_s = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([ready_fd], [], [], left_s)[0]:
            process.end()
            raise EngineStartError(
                f"the embedded engine must listen within {timeout_s:g} s; it did not, and was killed. "
                f"Its last lines:\n{_last_lines(log)}"
            )
        chunk = os.read(ready_fd, 4096)
        if not chunk:
            status = process.stop(grace_s=5.0)
            raise EngineStartError(
                f"the embedded engine must come up; it exited with status {status}. "
                f"Its last lines:\n{_last_lines(log)}"
            )
        line += chunk
    ready: dict[str, Any] = json.loads(line)
    return ready


def _last_lines(log: IO[bytes]) -> str:
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - 16384))
    return "\n".join(log.read().decode(errors="replace").splitlines()[-_NUM_LAST_LINES:])
