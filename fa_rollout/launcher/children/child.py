"""A program that the launcher runs: where its output goes, and an end that reaches all below it.

Invariant: descendants that left its process group are ended as the kernel names them, never by a name.
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
    """A child with a name, whose descendants end with it."""

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
        """Its output goes to `log`, or by `relay`, or where the launcher's goes.

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
        """Send to its process group, unless it has ended."""
        if self.status is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found = psutil.Process(self.pid).children(recursive=True)
                self._descendants = list(dict.fromkeys([*self._descendants, *found]))
        super().signal(number)

    def kill(self) -> None:
        """Kill its process group, and every descendant that left the group for a session of its own."""
        self.signal(signal.SIGKILL)
        for process in self._descendants:
            # psutil compares the start time first, so a number that was given out again is left alone.
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()


def _opened(log: Path) -> BinaryIO | None:
    """A log that cannot be opened (its folder is gone) keeps no program from its start."""
    try:
        return append_private(log)
    except OSError as error:
        logger.warning("log=%s event=not_opened reason=%s", log, error.strerror)
        return None
