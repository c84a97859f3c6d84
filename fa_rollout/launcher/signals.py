"""Interrupts as something that a loop can wait for.

In: SIGINT, SIGTERM, SIGHUP. Out: a readable descriptor and the list of what came. Invariant: between enter
and exit no signal ends the process or raises; what was set before is set again afterwards.
"""

import signal
import socket
from types import FrameType, TracebackType
from typing import Any, Self

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Collects interrupts. Only in the main thread, like every signal handler of Python."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._read, self._write = socket.socketpair()
        self._previous: dict[int, Any] = {}
        self._previous_wakeup = -1

    def __enter__(self) -> Self:
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._previous_wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for signum in _WATCHED:
            # Under nohup SIGHUP is ignored, and stays so.
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._read.close()
        self._write.close()

    def fileno(self) -> int:
        return self._read.fileno()

    def drain(self) -> None:
        """Empty the descriptor; `received` has been filled by the handlers."""
        try:
            while self._read.recv(512):
                pass
        except BlockingIOError:
            pass

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)
