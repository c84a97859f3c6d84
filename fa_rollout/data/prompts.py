"""The prompts of a run: rows of one or more files, all checked at the start and read on demand.

In: `config.Data`. Out: `Row`s by index; index i is the same row as long as the files do not change. No row is
dropped silently: a bad row ends the start, or is counted and logged with `on_bad_row = "skip"`. Blank lines
are ignored.
"""

import glob
import logging
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from fa_rollout import config
from fa_rollout.config import ConfigError
from fa_rollout.config.paths import PathError, expanded
from fa_rollout.data.jsonl import JsonlFile
from fa_rollout.data.parquet import ParquetFile
from fa_rollout.data.row import Row, listed, row_from

logger = logging.getLogger(__name__)

_READERS: dict[str, Callable[..., JsonlFile | ParquetFile]] = {
    ".jsonl": JsonlFile,
    ".ndjson": JsonlFile,
    ".parquet": ParquetFile,
}
_NUM_SKIPS_LOGGED = 5


class PromptSource:
    """All rows of the data set, by index."""

    def __init__(
        self, files: list[JsonlFile | ParquetFile], data: config.Data, num_skipped_rows: int = 0
    ) -> None:
        self._files = files
        self._data = data
        self._ends = list(accumulate(file.num_rows for file in files))
        self.num_skipped_rows = num_skipped_rows
        """Bad rows skipped because of `on_bad_row = "skip"`."""

    @classmethod
    def open(cls, data: config.Data) -> "PromptSource":
        """Find the files and check every row.

        Raises:
            ConfigError: no file, an unknown file type, no row, or a bad row; the text names the file and the
                line (from 1) or the Parquet row (from 0).
        """
        skips = _Skips(allowed=data.on_bad_row == "skip")
        files = [_open_file(path, data, skips) for path in _find(data.path)]
        source = cls(files, data, skips.count)
        skips.summarise(len(source))
        if not len(source):
            raise ConfigError(
                f"data.path = {data.path!r} must hold at least one prompt; found none{skips.also()}"
            )
        _check_keys(files, data)
        return source

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, index: int) -> Row:
        """One row, 0 <= index < len(self).

        Raises:
            ConfigError: the file has changed since it was opened.
        """
        assert 0 <= index < len(self), f"row {index} of {len(self)}"
        which = bisect_right(self._ends, index)
        start = self._ends[which - 1] if which else 0
        return row_from(self._files[which].values(index - start), self._data)

    def close(self) -> None:
        """Close the files; rows cannot be read afterwards."""
        for file in self._files:
            file.close()


class _Skips:
    """Counts bad rows if skipping is allowed; otherwise raises at the first."""

    def __init__(self, *, allowed: bool) -> None:
        self.allowed = allowed
        self.count = 0

    def __call__(self, place: str, reason: str) -> None:
        if not self.allowed:
            raise ConfigError(
                f"bad row at {place}: {reason}; fix it, or skip and count such rows with "
                'data.on_bad_row = "skip"'
            )
        self.count += 1
        if self.count <= _NUM_SKIPS_LOGGED:
            logger.warning("row skipped place=%s reason=%s", place, reason)

    def summarise(self, num_rows: int) -> None:
        if self.count:
            logger.warning("rows skipped num_skipped=%d num_rows=%d", self.count, num_rows)

    def also(self) -> str:
        return f" ({self.count} bad rows were skipped)" if self.count else ""


def _find(pattern: str) -> list[Path]:
    try:
        literal = Path(expanded("data.path", pattern))  # an evaluation's path may come from a call
    except PathError as error:
        raise ConfigError(str(error)) from None
    if literal.is_file():
        return [literal]
    if literal.is_dir():
        raise ConfigError(
            f"data.path must name files, found the folder {pattern!r}; use a pattern such as "
            f"{pattern.rstrip('/')}/*.jsonl"
        )
    paths = [Path(name) for name in sorted(glob.glob(str(literal), recursive=True)) if Path(name).is_file()]
    if not paths:
        raise ConfigError(f"data.path = {pattern!r} matches no file (working directory: {Path.cwd()})")
    return paths


def _open_file(path: Path, data: config.Data, on_bad: Callable[[str, str], None]) -> JsonlFile | ParquetFile:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path} has an unknown file type: its name must end in {listed(_READERS)}")
    try:
        if path.stat().st_size == 0:
            raise ConfigError(f"{path} is empty (0 bytes): was it written completely?")
        return reader(path, data, on_bad)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _check_keys(files: list[JsonlFile | ParquetFile], data: config.Data) -> None:
    """Refuse keys that no row has, usually typos; only the default label key may be missing."""
    found = set().union(*(file.keys for file in files))
    named = [("data.tools_key", data.tools_key)]
    named.append(("data.chat_template_kwargs_key", data.chat_template_kwargs_key))
    named += [("data.metadata_keys", key) for key in data.metadata_keys or []]
    if data.label_key != "label":
        named.append(("data.label_key", data.label_key))
    for option, key in named:
        if key is not None and key not in found:
            raise ConfigError(f"{option} names {key!r}, which no row has; found {listed(sorted(found))}")
