"""A program that the launcher runs: where its output goes, and how it is killed with all its descendants.

Invariant: descendants that left its process group are killed by pid, never by name.
"""

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO

import psutil

from fa_rollout.launcher.children.relay import Relay
from fa_rollout.launcher.children.signals import notices_ignored
from fa_rollout.process.child import ChildProcess
from fa_rollout.process.private_files import append_private

logger = logging.getLogger(__name__)


class Child(ChildProcess):
    """A named child, killed together with its descendants."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        log: Path | None = None,
        own_session: bool = False,
        relay: Relay | None = None,
    ) -> None:
        """Its output goes to `log`, else through `relay`, else to the launcher's streams.

        Args:
            environment: in addition to the launcher's.

        Raises:
            OSError: the command cannot be executed.
        """
        self.name = name
        self._descendants: list[psutil.Process] = []
        output = None if log is None else _opened(log)
        stdout: int | IO[bytes] | None = output
        stderr: int | None = None if output is None else subprocess.STDOUT
        if output is None and relay is not None:
            stdout, stderr = relay.stdout, relay.stderr
            pass_fds = (*pass_fds, *relay.readers)
        try:
            with notices_ignored():
                super().__init__(
                    command,
                    environment=None if environment is None else {**os.environ, **environment},
                    pass_fds=pass_fds,
                    stdout=stdout,
                    stderr=stderr,
                    own_session=own_session,
                )
        finally:
            if output is not None:
                output.close()
            if relay is not None:
                relay.started()

    def signal(self, number: int) -> None:
        """Send a signal to its process group, unless it has exited."""
        if self.status is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found = psutil.Process(self.pid).children(recursive=True)
                self._descendants = list(dict.fromkeys([*self._descendants, *found]))
        super().signal(number)

    def kill(self) -> None:
        """Kill its process group, and every descendant that moved to another session."""
        self.signal(signal.SIGKILL)
        for process in self._descendants:
            # psutil compares the start time first, so a process that reuses the pid is not killed.
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()


def _opened(log: Path) -> BinaryIO | None:
    """The log file; None if it cannot be opened, since the program must start anyway."""
    try:
        return append_private(log)
    except OSError as error:
        logger.warning(
            "cannot open the log file %s (%s); its output goes to the terminal", log, error.strerror
        )
        return None
