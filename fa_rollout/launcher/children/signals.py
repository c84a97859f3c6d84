"""Signals that a loop can poll for.

In: SIGINT, SIGTERM, SIGHUP, SIGQUIT, and SIGUSR1 and SIGUSR2, by which Slurm announces the end of a job.
Out: a readable descriptor and the list of received signals. Invariant: between enter and exit no signal ends
the process or raises; the previous handlers are restored on exit.
"""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""Slurm sends one to every process of a job step: the launcher acts on it, its children must survive it."""
WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, *NOTICES)


@contextlib.contextmanager
def notices_ignored() -> Iterator[None]:
    """Programs started in this block ignore SIGUSR1 and SIGUSR2 unless they set a handler: ignored signals
    stay ignored across exec."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A handler set by C code reads as None and could not be restored.
    ours = [signum for signum in NOTICES if signal.getsignal(signum) is not None]
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in ours}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class Signals:
    """Collects signals. Only in the main thread, like every Python signal handler."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._read, self._write = socket.socketpair()
        self._previous: dict[int, Any] = {}
        self._previous_wakeup = -1

    def __enter__(self) -> Self:
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._previous_wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for signum in WATCHED:
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

    @property
    def is_urgent(self) -> bool:
        """Whether the user wants the run to end at once (Ctrl-\\)."""
        return signal.SIGQUIT in self.received

    def drain(self) -> None:
        """Empty the descriptor; the handlers have filled `received`."""
        try:
            while self._read.recv(512):
                pass
        except BlockingIOError:
            pass

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)
