"""One process that the launcher started: how it is watched and how it is ended.

In: a command line. Out: an exit code. Invariant: signals go only to the process itself, to the process group
that it leads while it has not been waited for (so its number cannot belong to anybody else), and to its
descendants as the kernel names them; never to a name.
"""

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO, Self

import psutil

from fa_rollout.launcher.children.relay import Relay
from fa_rollout.launcher.children.signals import notices_ignored
from fa_rollout.process.private_files import append_private

logger = logging.getLogger(__name__)

_KILLED_DEADLINE_S = 30.0


class Child:
    """A child process at the head of its own process group, known by a pidfd."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]") -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._descendants: list[psutil.Process] = []
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError:
            # Some sandboxes refuse pidfds; the launcher's loop also looks once a tick.
            self._pidfd = -1

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        log: Path | None = None,
        own_session: bool = False,
        relay: Relay | None = None,
    ) -> Self:
        """Start `command` without standard input; its output goes to `log`, or by `relay`, or where the
        launcher's goes.

        Raises:
            OSError: the command cannot be executed.
        """
        output = None if log is None else _opened(log)
        stdout: int | IO[bytes] | None = output
        stderr: int | None = None if output is None else subprocess.STDOUT
        if output is None and relay is not None:
            stdout, stderr = relay.stdout, relay.stderr
            pass_fds = (*pass_fds, *relay.readers)
        try:
            with notices_ignored():
                process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=None if environment is None else {**os.environ, **environment},
                    pass_fds=tuple(pass_fds),
                    start_new_session=own_session,
                    process_group=None if own_session else 0,
                )
        finally:
            if output is not None:
                output.close()
            if relay is not None:
                relay.started()
        return cls(name, process)

    @property
    def pidfd(self) -> int:
        """Becomes readable at death; -1 where the system has none."""
        return self._pidfd

    @property
    def exit_code(self) -> int | None:
        """None while it runs; as the shell gives it (128 + signal) once it has ended."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def signal(self, signum: int) -> None:
        """Send to the child's process group, unless the child has ended."""
        if self._process.poll() is None:
            self._descendants = _union(self._descendants, _descendants_of(self.pid))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signum)

    def kill(self) -> None:
        """Kill the group, and every descendant that left the group for a session of its own."""
        self.signal(signal.SIGKILL)
        for process in self._descendants:
            # psutil compares the start time first, so a number that was given out again is left alone.
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()

    def end(self) -> None:
        """Kill what still runs, wait for it, give back the pidfd; idempotent."""
        self.kill()
        # A killed process dies unless the kernel itself is stuck: this wait ends.
        self._process.wait(timeout=_KILLED_DEADLINE_S)
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _opened(log: Path) -> BinaryIO | None:
    """A log that cannot be opened (its folder is gone) keeps no program from its start."""
    try:
        return append_private(log)
    except OSError as error:
        logger.warning("log=%s event=not_opened reason=%s", log, error.strerror)
        return None


def _descendants_of(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _union(known: list[psutil.Process], found: list[psutil.Process]) -> list[psutil.Process]:
    return list(dict.fromkeys([*known, *found]))
