"""Files that only their user may read, whatever the umask: they hold prompts, answers and addresses."""

import os
from pathlib import Path
from typing import BinaryIO, cast


def append_private(path: Path) -> BinaryIO:
    """Open for appending, unbuffered; one that is there already becomes private too.

    Raises:
        OSError: as `open` does.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    file = cast(BinaryIO, os.fdopen(fd, "ab", buffering=0))
    if os.fstat(file.fileno()).st_uid == os.geteuid():
        os.fchmod(file.fileno(), 0o600)
    return file


def write_private(path: Path, text: str) -> None:
    """Replace the text of a file."""
    with open(path, "w", encoding="utf-8", opener=_private) as file:
        file.write(text)


def make_private(folder: Path) -> None:
    """Create a folder and its parents; an existing one stays as it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
