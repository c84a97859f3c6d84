"""A run's output folder: created if missing, and used by one run at a time.

In: `run.output_dir`. Out: a folder whose file `.lock` this process and its hub hold locked. Invariant: the
lock is released when the last of the two exits, however it exits. A later run in the same folder appends to
the same files.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from shm.errors import FaRolloutError

logger = logging.getLogger(__name__)

LOCK = ".lock"
WAY_OUT = "choose another folder, or wait until that run ends; each node of a job needs its own folder"
_CLOSING_S = 15.0
"""The longest time a hub takes to write its last records after its launcher was killed."""
_LOOK_S = 0.1
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""From file systems without locks."""


class OutputFolderError(FaRolloutError, OSError):
    """The output folder cannot be used; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The run that uses a folder."""

    pid: int
    """Of its launcher."""
    host: str
    born_s: float
    """Start time of that process, since a later process may get the same pid."""

    @property
    def lives(self) -> bool:
        """False if its launcher is gone: its hub is writing the last records."""
        if self.host != socket.gethostname():
            return True
        try:
            return bool(abs(psutil.Process(self.pid).create_time() - self.born_s) < 1.0)
        except psutil.NoSuchProcess:
            return False

    def __str__(self) -> str:
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"process {self.pid}{where}"


class OutputFolder:
    """The folder while its run holds the lock; empty if the run keeps no records."""

    def __init__(self, lock_fd: int | None) -> None:
        self.lock_fd = lock_fd
        """Inherited by the hub, which may outlive its launcher for a moment; None: there is no lock."""

    @classmethod
    def open(cls, path: str | None) -> Self:
        """Create the folder, private to its user, and take its lock.

        Raises:
            OutputFolderError: it cannot be created, or another run uses it.
        """
        if path is None:
            return cls(None)
        try:
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(Path(path, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise OutputFolderError(
                f"run.output_dir = {path!r} must be a writable folder: {error.strerror}; choose another"
            ) from error
        try:
            return cls(fd if _lock(fd, path) else None)
        except BaseException:
            os.close(fd)
            raise

    @property
    def lock_fds(self) -> tuple[int, ...]:
        """Descriptors a child must inherit to hold the lock too."""
        return () if self.lock_fd is None else (self.lock_fd,)

    def close(self) -> None:
        """Release the lock; idempotent."""
        if self.lock_fd is not None:
            os.close(self.lock_fd)
            self.lock_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def holder_of(path: str) -> Holder | None:
    """The run that uses a folder now; None if there is none, or only its hub is left."""
    try:
        fd = os.open(Path(path, LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _read(fd)
        return holder if holder is not None and holder.lives else None
    except OSError:
        return None
    finally:
        os.close(fd)
    return None


def in_use(path: str, holder: Holder | None) -> str:
    """The error text for a folder that another run uses."""
    by = "" if holder is None else f" ({holder})"
    return f"run.output_dir = {path!r} is in use by another run{by}"


def _lock(fd: int, path: str) -> bool:
    """Take the lock; False if the file system has no locks."""
    deadline_s = time.monotonic() + _CLOSING_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = _read(fd)
            if (holder is not None and holder.lives) or time.monotonic() > deadline_s:
                raise OutputFolderError(f"{in_use(path, holder)}: {WAY_OUT}") from None
            time.sleep(_LOOK_S)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning("output_dir=%s event=no_locks reason=%s", path, error.strerror)
            return False
    me = {"pid": os.getpid(), "host": socket.gethostname(), "born_s": psutil.Process().create_time()}
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(me).encode(), 0)
    return True


def _read(fd: int) -> Holder | None:
    try:
        found: Any = json.loads(os.pread(fd, 4096, 0))
        return Holder(pid=int(found["pid"]), host=str(found["host"]), born_s=float(found["born_s"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # its holder has not signed yet
