"""The safetensors files of one publication.

In: shards, each small enough to hold. Out: `model.safetensors`, or numbered files and an index.

Invariant: a file has its final name only when it is whole; after a failure none is left.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_hook.errors import PublishFailed

if TYPE_CHECKING:
    import torch


def num_bytes(tensor: "torch.Tensor") -> int:
    return tensor.numel() * tensor.element_size()


class WeightFiles:
    """Writes shard after shard; holds its first failure back until `finish`: others wait in collectives."""

    def __init__(self, folder: Path, num_files: int) -> None:
        self.failure: PublishFailed | None = None
        self._folder = folder
        self._num_files = num_files
        self._paths: list[Path] = []
        self._weight_map: dict[str, str] = {}
        self._total_bytes = 0

    def check_room(self, needed_bytes: int) -> None:
        try:
            free_bytes = shutil.disk_usage(self._folder).free
        except OSError as error:
            self._fail(error)
            return
        if needed_bytes > free_bytes:
            self._fail(OSError(errno.ENOSPC, f"{needed_bytes} bytes are needed, {free_bytes} are free"))

    def write(self, shard: "Mapping[str, torch.Tensor]") -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if self.failure is not None:
            return
        number = len(self._paths) + 1
        single = self._num_files == 1
        name = "model.safetensors" if single else f"model-{number:05}-of-{self._num_files:05}.safetensors"
        try:
            with _replacing(self._folder / name) as partial:
                save_file(dict(shard), partial, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            self._fail(error)
            return
        self._paths.append(self._folder / name)
        self._weight_map.update(dict.fromkeys(shard, name))
        self._total_bytes += sum(map(num_bytes, shard.values()))

    def finish(self) -> list[Path]:
        if self.failure is None and self._num_files > 1:
            self._write_index()
        if self.failure is not None:
            for path in self._paths:
                path.unlink(missing_ok=True)
            raise self.failure
        return self._paths

    def _write_index(self) -> None:
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._weight_map}
        path = self._folder / "model.safetensors.index.json"
        try:
            with _replacing(path) as partial:
                partial.write_text(json.dumps(index, indent=1), encoding="utf-8")
        except OSError as error:
            self._fail(error)
        else:
            self._paths.append(path)

    def _fail(self, error: Exception) -> None:
        self.failure = PublishFailed(
            f"weights must be written whole to {self._folder}; writing failed: {error}; free space there "
            "or name another folder for the run's weights; engines keep the version they have"
        )
        self.failure.__cause__ = error


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A name to write under; it becomes `path` when the block ends, and is removed when it raises."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
