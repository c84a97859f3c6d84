"""A handle on SGLang in processes of its own: start, addresses, stop.

The supervisor is an exec of a fresh interpreter in its own session and ends with its parent however that
comes about; an error at the start carries the last lines that were written.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from fa_rollout.demo.sglang import SGLangError, interpreter

START_TIMEOUT_S = 300.0
_NUM_LAST_LINES = 20
_STOP_S = 15.0


class SGLangServer:
    """A running server, or router. Close it with `stop`, or use it as a context manager."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, urls: Sequence[str]) -> None:
        self.process = process
        self.log = log
        self.url = urls[0]
        self.router_url = urls[1] if len(urls) > 1 else None

    @classmethod
    def start(
        cls,
        model: str | Path,
        *,
        log: Path,
        port: int = 0,
        threads: int = 1,
        router: bool = False,
        options: Sequence[str] = (),
        timeout_s: float = START_TIMEOUT_S,
    ) -> Self:
        """Start a server of the model, with a router in front if wanted, and wait until it works.

        `options` are further arguments of `sglang.launch_server`.

        Raises:
            SGLangError: not installed, or not up in time.
        """
        words = ["serve", str(model), "--port", str(port), "--threads", str(threads)]
        return cls._start([*words, *(["--router"] if router else [])], options, log, timeout_s)

    @classmethod
    def start_router(
        cls,
        worker_urls: Sequence[str],
        *,
        log: Path,
        options: Sequence[str] = (),
        timeout_s: float = 60.0,
    ) -> Self:
        """Start a router over workers that run; `options` are further arguments of its own.

        Raises:
            SGLangError: not installed, or not up in time.
        """
        return cls._start(["route", *worker_urls], options, log, timeout_s)

    @classmethod
    def _start(cls, words: Sequence[str], options: Sequence[str], log: Path, timeout_s: float) -> Self:
        interpreter()
        ready_read, ready_write = os.pipe()
        command = [sys.executable, "-m", "tests.kit.sglang_cpu", *words, "--log", str(log)]
        command += ["--timeout", str(timeout_s), "--ready-fd", str(ready_write)]
        command += ["--parent-pid", str(os.getpid()), "--", *options]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[ready_write],
                start_new_session=True,
            )
        os.close(ready_write)
        try:
            line = _read_line(ready_read, time.monotonic() + timeout_s + _STOP_S)
        finally:
            os.close(ready_read)
        server = cls(process, log, json.loads(line)["urls"] if line else [""])
        if not line:
            status = server.stop()
            raise SGLangError(
                f"SGLang must come up within {timeout_s:g} s; status {status}, its last lines:\n"
                f"{last_lines(log)}"
            )
        return server

    @property
    def is_alive(self) -> bool:
        """False once the server has ended, by itself or by `stop`."""
        return self.process.poll() is None

    def stop(self) -> int:
        """End it and all below it; the supervisor's exit status. May be called twice."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _read_line(fd: int, deadline: float) -> bytes:
    """Up to the end of a line; empty when none came."""
    line = b""
    while not line.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
            return b""
        chunk = os.read(fd, 4096)
        if not chunk:
            return b""
        line += chunk
    return line


def last_lines(log: Path) -> str:
    """The end of what a server wrote."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_NUM_LAST_LINES:])
