"""Forwards a child's output, so that a closed or blocked stream of this process never affects the child.

In: a child's standard output and error. Out: the same text on this process's streams, which neither fail nor
block (`fa_rollout.process.streams`). If a stream is a terminal, the child inherits it, since programs behave
differently on a terminal.
Invariant: the child never writes to a pipe without a reader: it holds a reading end itself, in case this
process is killed.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
from typing import TextIO

from fa_rollout.process import streams

_CHUNK_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20
"""Room for what a child writes after this process was killed."""


class Relay:
    """Both streams of one child; one pipe if both go to the same file, so that lines keep their order."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._writers: list[int] = []
        self.readers: list[int] = []
        """Reading ends, for the child to inherit."""
        is_one = os.path.sameopenfile(1, 2)
        self.stdout = self._pipe(sys.stdout)
        """For `Popen`: a descriptor, or None if the child inherits the stream."""
        self.stderr: int | None = (
            subprocess.STDOUT if is_one and self.stdout is not None else self._pipe(sys.stderr)
        )

    def started(self) -> None:
        """Close the writing ends: the child has them, or failed to start."""
        for fd in self._writers:
            os.close(fd)
        self._writers.clear()

    def drain(self, limit_s: float) -> None:
        """Wait until the child's output is forwarded, unless a process it started still holds the pipe."""
        for thread in self._threads:
            thread.join(limit_s)

    def _pipe(self, target: TextIO) -> int | None:
        if not streams.is_secure(target) or target.isatty():
            return None
        reader, writer = os.pipe()
        with contextlib.suppress(OSError):  # over the user's limit
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._writers.append(writer)
        self.readers.append(reader)
        thread = threading.Thread(target=_forward, args=(reader, target), name="relay", daemon=True)
        self._threads.append(thread)
        thread.start()
        return writer


def _forward(reader: int, target: TextIO) -> None:
    with open(reader, "rb", buffering=0) as pipe:
        while chunk := pipe.read(_CHUNK_BYTES):
            target.buffer.write(chunk)
            target.buffer.flush()
