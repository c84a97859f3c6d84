"""A child process, from start to exit: this package starts every process through this class.

In: a command line. Out: an exit status. Invariant: signals go only to the process and the process group that
it leads, and only before it is reaped, so the pid cannot belong to another process; never to a name.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from shm.liveness import open_pidfd

_KILLED_DEADLINE_S = 30.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class ChildProcess:
    """A process that leads its own group, without standard input, watched by a pidfd."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        folder: Path | None = None,
        own_session: bool = True,
        dies_with_parent: bool = False,
    ) -> None:
        """
        Args:
            environment: all of it; by default this process's.
            own_session: no terminal either, in addition to a group of its own.
            dies_with_parent: see `die_with_parent`; for programs that cannot watch their parent.

        Raises:
            OSError: the command cannot be executed.
        """
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            cwd=folder,
            pass_fds=tuple(pass_fds),
            start_new_session=own_session,
            process_group=None if own_session else 0,
            preexec_fn=die_with_parent if dies_with_parent else None,
        )
        self.pid = self._process.pid
        self.pidfd: int | None = None
        """Readable at exit; None if the system refuses pidfds, and after `close`."""
        with contextlib.suppress(ProcessLookupError):
            self.pidfd = open_pidfd(self.pid)

    @property
    def status(self) -> int | None:
        """None while it runs; then its exit code, or the negative number of the signal that killed it."""
        return self._process.poll()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; then as a shell reports it (128 + signal)."""
        code = self.status
        return code if code is None or code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        """Send a signal to its process group, unless it has exited."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill its process group."""
        self.signal(signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its status, once it has ended; None when it still runs after the timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def stop(self, grace_s: float) -> int | None:
        """End it by SIGTERM, and by force after `grace_s`; its status. Idempotent."""
        self.signal(signal.SIGTERM)
        if self.wait(grace_s) is None:
            self.kill()
        self.end()
        return self.status

    def end(self) -> None:
        """Kill it if it still runs, wait for it, close the pidfd; idempotent."""
        self.kill()
        # A killed process dies unless the kernel itself is stuck: this wait ends.
        self._process.wait(_KILLED_DEADLINE_S)
        self.close()

    def close(self) -> None:
        """Close the pidfd; idempotent."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    The last resort beside a parent watch: only for what the main thread of a short program starts.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
