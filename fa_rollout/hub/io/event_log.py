"""The append-only log of a run: one JSON object a line, for report and replay, never for resume."""

import os
from pathlib import Path
from types import TracebackType

import msgspec

from fa_rollout.process.private_files import append_private

FLUSH_BYTES = 1 << 16


class EventLog:
    """Buffered writer; `flush` is called once a second and at the end.

    A log that cannot be written (a full disk) is given up with one warning: the run goes on. A line that a
    kill has cut short stands alone: what comes after it begins a new one.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else append_private(path)
        self._buffer = bytearray(b"" if path is None or _is_whole(path) else b"\n")
        self._encoder = msgspec.json.Encoder()
        self.failure: str | None = None
        """Why the log ended early."""

    def write(self, event: msgspec.Struct) -> None:
        """Append an event."""
        if self._file is None:
            return
        self._buffer += self._encoder.encode(event)
        self._buffer += b"\n"
        if len(self._buffer) >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Give the buffered events to the file."""
        if self._file is None or not self._buffer:
            return
        try:
            while self._buffer:  # a disk that is nearly full takes a part, and says no to the next
                del self._buffer[: self._file.write(self._buffer)]
        except OSError as error:
            self.failure = f"the event log {self._file.name} ends here: {error.strerror}"
            self._file.close()
            self._file = None
        self._buffer.clear()

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def _is_whole(path: Path) -> bool:
    """Whether the file ends with a whole line, or is empty."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
