"""The run directory: a private folder that lives exactly as long as its run.

In: nothing but the environment. Out: a folder `fa_rollout-<128 random bits>`, mode 0700, that holds the
hub's socket and the weight files on their way to the engines. Invariant: a folder may be removed only by who
holds the lock of the file `lock` in it. The launcher holds it from birth, the hub inherits it, so a lock that
can be taken proves that the run is gone, however it ended.
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
    """There is no place for a run directory."""


class RunDirectory:
    """A locked private folder; removed with all that is in it on `close`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.lock_fd = lock_fd
        """Pass it on to a child that must keep the folder from being swept; never write to it."""

    @classmethod
    def create(cls, base: Path | None = None, *, option: str = "TMPDIR") -> Self:
        """Sweep what dead runs of this user left under `base`, then make a new folder there.

        `option`: what the user may change where that cannot be done.
        """
        base = base or run_base()
        for path in _abandoned(base):
            logger.info("run_directory=%s event=swept", path)
        while True:
            path = base / f"{_PREFIX}{secrets.token_hex(16)}"
            try:
                path.mkdir(mode=0o700)
            except OSError as error:
                raise RunDirectoryError(
                    f"a run needs a private folder under {base}, which cannot be made ({error.strerror}); "
                    f"point {option} at a folder that is yours"
                ) from error
            lock_fd = _take_lock(path)
            if lock_fd is not None:
                return cls(path, lock_fd)
            # Another run's sweep came between mkdir and the lock and took the still unlocked folder.

    def close(self) -> None:
        if self.lock_fd < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        if self.path.exists():
            logger.warning("run_directory=%s event=not_removed", self.path)
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
    """Let the run's folder `weights` be one of its own under `base`, which lives as long; None: a plain one.

    Raises:
        RunDirectoryError: there is no place for it.
    """
    if base is None:
        yield
        return
    with contextlib.suppress(OSError):  # told by `create`
        Path(base).mkdir(parents=True, exist_ok=True)
    with RunDirectory.create(Path(base).resolve(), option="trainer.weights_dir") as weights:
        (directory.path / "weights").symlink_to(weights.path)
        yield


def run_folders(base: Path | None = None) -> Iterator[Path]:
    """Folders of this user's runs that go on."""
    for path in _folders(base or run_base()):
        lock_fd = _take_lock(path, create=False)
        if lock_fd is not None:
            os.close(lock_fd)  # nobody holds it: its run is gone
        elif (path / "lock").exists():
            yield path


def run_base() -> Path:
    """$XDG_RUNTIME_DIR where it is private, else the temporary folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        with contextlib.suppress(OSError):
            status = os.stat(runtime)
            if stat.S_IMODE(status.st_mode) == 0o700 and status.st_uid == os.getuid():
                return Path(runtime)
    return Path(tempfile.gettempdir())


def _take_lock(folder: Path, *, create: bool = True) -> int | None:
    """Descriptor of the folder's lock file, locked; None when somebody else has it or the folder is gone."""
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
    """Remove every folder under `base` that is provably a dead run's of this user; yield its path."""
    for path in _folders(base):
        with contextlib.suppress(FileNotFoundError):
            if _remove_if_abandoned(path):
                yield path


def _folders(base: Path) -> Iterator[Path]:
    """Folders under `base` that are, or were, this user's runs'."""
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
        # Either alive, or made a moment ago and not locked yet; or its owner died in that moment: then the
        # folder is empty. rmdir takes an empty one only, and its owner, if alive, makes another.
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
