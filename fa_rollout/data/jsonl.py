"""Rows of a JSONL file: one JSON object a line, UTF-8, read when asked for.

Opening decodes every line once, so that nothing is found broken in the middle of a run, and keeps the place
of each good one; the text itself stays in the file.
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
    """A file whose lines were all checked; `num_rows` good ones can be read by index."""

    def __init__(self, path: Path, data: config.Data, on_bad: Callable[[str, str], None]) -> None:
        """Check the whole file; `on_bad(place, reason)` hears of each bad line, and raises to stop there."""
        self.path = path
        self.keys: set[str] = set()
        """Every key that some row has."""
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
            ConfigError: the file is no longer what it was when it was opened.
        """
        line = os.pread(self._fd, self._lengths[index], self._offsets[index])
        try:
            return _object(line)
        except BadRow as error:
            raise ConfigError(
                f"{self.path} must not change while a run reads it: the row at byte {self._offsets[index]} "
                f"was good when the run began and now is not ({error}); restart the run"
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
