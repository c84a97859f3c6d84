"""Standard output and error that never fail or block the process that writes to them.

In: text. Out: the same text at the descriptor, written by a thread. Invariant: a full disk, a lost terminal,
a closed or unread pipe lose text and have no other effect; lost bytes are counted and reported.
"""

import atexit
import contextlib
import io
import os
import select
import sys
import threading
from collections import deque
from typing import Any

_MOST_BYTES = 1 << 20
"""Text that waits for a reader."""
_FLUSH_S = 0.5
_EXIT_S = 1.0


def open_standard() -> None:
    """Open those of descriptors 0 to 2 that are closed, so that no file or socket gets their numbers."""
    for fd, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, flags)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def secure() -> None:
    """Make prints and logs of this process unable to fail or block."""
    open_standard()
    sys.stdout, sys.stderr = _Text(1), _Text(2)


def is_secure(stream: object) -> bool:
    """Whether writing to it neither fails nor blocks."""
    return isinstance(stream, _Text)


class _Text(io.TextIOWrapper):
    """Text of one descriptor; a line is sent once it is complete."""

    def __init__(self, fd: int) -> None:
        self._pump = _Pump(fd)
        super().__init__(
            io.BufferedWriter(_Raw(self._pump)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        atexit.register(self._pump.drain, _EXIT_S)

    def flush(self) -> None:
        super().flush()
        self._pump.drain(_FLUSH_S)


class _Raw(io.RawIOBase):
    """The pump as a file."""

    def __init__(self, pump: "_Pump") -> None:
        self._pump = pump

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return self._pump.put(bytes(data))

    def fileno(self) -> int:
        return self._pump.fd

    def isatty(self) -> bool:
        return os.isatty(self._pump.fd)


class _Pump:
    """Queues bytes at once, and writes them when the descriptor is ready."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_lost = 0
        self._is_stuck = False
        """A flush was in vain; the next ones do not wait until something moves."""
        self._thread: threading.Thread | None = None

    def put(self, data: bytes) -> int:
        with self._changed:
            if self._num_bytes + len(data) > _MOST_BYTES:
                self._num_lost += len(data)
                return len(data)
            self._waiting.append(data)
            self._num_bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"output-{self.fd}", daemon=True)
                # None can be started while the interpreter ends.
                with contextlib.suppress(RuntimeError):
                    self._thread.start()
            self._changed.notify_all()
        return len(data)

    def drain(self, limit_s: float) -> None:
        """Wait until all is written, but for no longer than the limit, and once only where nothing moves."""
        with self._changed:
            if not self._is_stuck and not self._changed.wait_for(lambda: not self._num_bytes, limit_s):
                self._is_stuck = True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data = self._waiting.popleft()
            _write(self.fd, data)
            with self._changed:
                self._num_bytes -= len(data)
                self._is_stuck = False
                if self._num_lost and not self._waiting:
                    note = f"[{self._num_lost:,} bytes of output were dropped: not read in time]\n".encode()
                    self._num_lost = 0
                    self._waiting.append(note)
                    self._num_bytes += len(note)
                self._changed.notify_all()


def _write(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # another process made it non-blocking
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
        except OSError:
            return
