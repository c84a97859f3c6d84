"""A child's output, passed on by this process: what becomes of it here is nothing that the child can feel.

In: what a child writes to its standard streams. Out: the same text on this process's own, which neither fail
nor block (`fa_rollout.process.streams`). A terminal is left to the child, which may want to know that it has
one.
Invariant: the child never meets a pipe without a reader: it holds one itself, should this process be killed.
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
"""Room for what a child says after this process was killed."""


class Relay:
    """Both streams of one child; one pipe where they go to one place, so that lines keep their order."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._writers: list[int] = []
        self.readers: list[int] = []
        """For the child to inherit."""
        is_one = os.path.sameopenfile(1, 2)
        self.stdout = self._pipe(sys.stdout)
        """For `Popen`: a descriptor, or None where the child writes by itself."""
        self.stderr: int | None = (
            subprocess.STDOUT if is_one and self.stdout is not None else self._pipe(sys.stderr)
        )

    def started(self) -> None:
        """The child has the writing ends, or there is none."""
        for fd in self._writers:
            os.close(fd)
        self._writers.clear()

    def drain(self, limit_s: float) -> None:
        """Wait until all that the child wrote is passed on, unless what it started still holds the pipe."""
        for thread in self._threads:
            thread.join(limit_s)

    def _pipe(self, target: TextIO) -> int | None:
        if not streams.is_secure(target) or target.isatty():
            return None
        reader, writer = os.pipe()
        with contextlib.suppress(OSError):  # beyond what the system allows a user
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._writers.append(writer)
        self.readers.append(reader)
        thread = threading.Thread(target=_pass_on, args=(reader, target), name="relay", daemon=True)
        self._threads.append(thread)
        thread.start()
        return writer


def _pass_on(reader: int, target: TextIO) -> None:
    with open(reader, "rb", buffering=0) as pipe:
        while chunk := pipe.read(_CHUNK_BYTES):
            target.buffer.write(chunk)
            target.buffer.flush()
