"""The run directory: a private folder that lives exactly as long as its run.

In: the environment. Out: a folder `fa_rollout-<128 random bits>`, mode 0700, that holds the hub's socket and
the weight files for the engines. Invariant: only the holder of the lock on the file `lock` in it may remove a
folder. The launcher takes the lock at creation and the hub inherits it, so if the lock is free, the run is
gone, however it ended.
"""

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from shm.errors import FaRolloutError

logger = logging.getLogger(__name__)

_PREFIX = "fa_rollout-"
_PATTERN = re.compile(re.escape(_PREFIX) + r"[0-9a-f]{32}")


class RunDirectoryError(FaRolloutError, OSError):
    """The run directory cannot be created."""


class RunDirectory:
    """A locked private folder; removed with its contents on `close`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.lock_fd = lock_fd
        """Inherited by a child that still needs the folder; never write to it."""

    @classmethod
    def create(cls, base: Path | None = None, *, option: str = "TMPDIR") -> Self:
        """Remove folders that dead runs of this user left under `base`, then create a new one there.

        `option`: the setting that the error names if that fails.
        """
        base = base or run_base()
        for path in _abandoned(base):
            logger.info("removed %s, left by a run that is gone", path)
        while True:
            path = base / f"{_PREFIX}{secrets.token_hex(16)}"
            try:
                path.mkdir(mode=0o700)
            except OSError as error:
                raise RunDirectoryError(
                    f"a run needs a private folder under {base}, which cannot be created "
                    f"({error.strerror}); set {option} to a folder you own"
                ) from error
            lock_fd = _take_lock(path)
            if lock_fd is not None:
                return cls(path, lock_fd)
            # Another run's sweep removed the folder between mkdir and the lock.

    def close(self) -> None:
        if self.lock_fd < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        if self.path.exists():
            logger.warning("cannot remove the run directory %s; remove it by hand", self.path)
        os.close(self.lock_fd)
        self.lock_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def with_weights_in(base: str | None, directory: RunDirectory) -> Iterator[None]:
    """Link the run's folder `weights` to a private folder under `base`; None: no link.

    Raises:
        RunDirectoryError: the folder cannot be created.
    """
    if base is None:
        yield
        return
    with contextlib.suppress(OSError):  # `create` raises for it
        Path(base).mkdir(parents=True, exist_ok=True)
    with RunDirectory.create(Path(base).resolve(), option="trainer.weights_dir") as weights:
        (directory.path / "weights").symlink_to(weights.path)
        yield


def run_folders(base: Path | None = None) -> Iterator[Path]:
    """Folders of this user's active runs."""
    for path in _folders(base or run_base()):
        lock_fd = _take_lock(path, create=False)
        if lock_fd is not None:
            os.close(lock_fd)  # it was free: the run is gone
        elif (path / "lock").exists():
            yield path


def run_base() -> Path:
    """$XDG_RUNTIME_DIR if it is private, else the temporary folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        with contextlib.suppress(OSError):
            status = os.stat(runtime)
            if stat.S_IMODE(status.st_mode) == 0o700 and status.st_uid == os.getuid():
                return Path(runtime)
    return Path(tempfile.gettempdir())


def _take_lock(folder: Path, *, create: bool = True) -> int | None:
    """Descriptor of the folder's lock file, locked; None if another process holds it or it is gone."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    try:
        fd = os.open(folder / "lock", flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        on_disk = os.stat(folder / "lock")
    except (BlockingIOError, FileNotFoundError):
        os.close(fd)
        return None
    if os.fstat(fd).st_ino != on_disk.st_ino:
        os.close(fd)
        return None
    return fd


def _abandoned(base: Path) -> Iterator[Path]:
    """Remove every folder under `base` of a dead run of this user; yield its path."""
    for path in _folders(base):
        with contextlib.suppress(FileNotFoundError):
            if _remove_if_abandoned(path):
                yield path


def _folders(base: Path) -> Iterator[Path]:
    """Folders under `base` of this user's runs, active or dead."""
    try:
        entries = list(os.scandir(base))
    except OSError:
        return
    for entry in entries:
        if not _PATTERN.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            if status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700:
                yield Path(entry.path)


def _remove_if_abandoned(path: Path) -> bool:
    lock_fd = _take_lock(path, create=False)
    if lock_fd is None:
        # The run is active, or its folder is not locked yet, or its owner died before it could lock it: then
        # the folder is empty. rmdir removes an empty folder only, and a live owner creates another.
        try:
            path.rmdir()
        except OSError:
            return False
        return True
    try:
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock_fd)
    return not path.exists()
