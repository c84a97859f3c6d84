"""A command in a terminal of its own, as a person has it: what it shows, and in what state it leaves it."""

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from types import TracebackType
from typing import Self

ENTER_SCREEN, LEAVE_SCREEN, SHOW_CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


class Terminal:
    """Runs `fa-rollout-proc` words in a pseudo-terminal."""

    def __init__(self, *words: str, environment: dict[str, str], columns: int = 80, rows: int = 24) -> None:
        self.output = b""
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fa_rollout.cli", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment | {"TERM": "xterm-256color"},
            start_new_session=True,
        )

    def read(self, timeout_s: float = 0.1) -> None:
        """Take in what is shown."""
        readable, _, _ = select.select([self._fd], [], [], timeout_s)
        if readable:
            with contextlib.suppress(OSError):
                self.output += os.read(self._fd, 1 << 16)

    def shows(self, text: str, timeout_s: float = 30.0) -> None:
        """Wait for a text."""
        deadline_s = time.monotonic() + timeout_s
        while text.encode() not in self.output:
            assert time.monotonic() < deadline_s, self.output[-3000:].decode(errors="replace")
            self.read()

    def press(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def end(self, timeout_s: float = 20.0) -> int:
        """The exit code."""
        deadline_s = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline_s, self.output[-3000:].decode(errors="replace")
            self.read()
        for _ in range(10):
            self.read(0.01)
        return self.process.wait()

    @property
    def is_as_before(self) -> bool:
        """Whether the other screen is left, the cursor is seen, and lines are edited as before."""
        last_screen = self.output.rfind(LEAVE_SCREEN) > self.output.rfind(ENTER_SCREEN)
        return last_screen and SHOW_CURSOR in self.output and termios.tcgetattr(self._theirs) == self._before

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self._fd)
        os.close(self._theirs)
