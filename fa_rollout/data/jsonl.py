"""Rows of a JSONL file: one JSON object per line, UTF-8, read on demand.

Opening decodes every line once, so that bad rows are found before the run, and stores the offset of each good
line; the text stays in the file.
"""

import os
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from fa_rollout import config
from fa_rollout.config import ConfigError
from fa_rollout.data.row import BadRow, check_numbers, row_from

_BOM = b"\xef\xbb\xbf"
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
_decoder = msgspec.json.Decoder()


class JsonlFile:
    """A file with all lines checked; the `num_rows` good rows can be read by index."""

    def __init__(self, path: Path, data: config.Data, on_bad: Callable[[str, str], None]) -> None:
        """Check the whole file; `on_bad(place, reason)` is called for each bad line and may raise to stop."""
        self.path = path
        self.keys: set[str] = set()
        """All keys that occur in any row."""
        self._offsets, self._lengths = array("q"), array("q")
        with path.open("rb", buffering=1 << 20) as file:
            self._fd = os.dup(file.fileno())
            offset = 0
            for number, line in enumerate(file, start=1):
                self._add(line, number, offset, data, on_bad)
                offset += len(line)

    def _add(
        self, line: bytes, number: int, offset: int, data: config.Data, on_bad: Callable[[str, str], None]
    ) -> None:
        skip = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
        line = line[skip:].rstrip()
        if not line:
            return
        try:
            values = _object(line)
            row = row_from(values, data)
            if _LONG_NUMBER.search(line):
                check_numbers(row)
        except BadRow as error:
            on_bad(f"{self.path}:{number}", str(error))
            return
        self.keys.update(values)
        self._offsets.append(offset + skip)
        self._lengths.append(len(line))

    @property
    def num_rows(self) -> int:
        return len(self._offsets)

    def values(self, index: int) -> dict[str, Any]:
        """The columns of a row.

        Raises:
            ConfigError: the file has changed since it was opened.
        """
        line = os.pread(self._fd, self._lengths[index], self._offsets[index])
        try:
            return _object(line)
        except BadRow as error:
            raise ConfigError(
                f"{self.path} must not change during a run: the row at byte {self._offsets[index]} was valid "
                f"at the start and no longer is ({error}); restart the run"
            ) from None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _object(line: bytes) -> dict[str, Any]:
    try:
        values = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRow(f"a row must be one JSON object in UTF-8 on one line: {error}") from None
    if not isinstance(values, dict):
        kind = "null" if values is None else type(values).__name__
        raise BadRow(f"a row must be a JSON object, found {kind}")
    return values
