"""The safetensors files of one weight version.

In: buckets, each small enough for memory. Out: `model.safetensors`, or several files and an index.

Invariants: a file gets its final name only when complete; after a failure no file remains; the folder
contains every weight once.
"""

import errno
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_hook.errors import PublishFailed
from trainer_hook.weights.gathering import num_bytes
from trainer_hook.weights.rest import MissingWeights

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"


class WeightFiles:
    """Writes bucket after bucket; raises its first failure in `finish`, as others wait in collectives."""

    def __init__(self, folder: Path, num_buckets: int) -> None:
        self.failure: PublishFailed | None = None
        self._folder = folder
        self._num_buckets = num_buckets
        self._num_written = 0
        self._paths: list[Path] = []
        self._weight_map: dict[str, str] = {}
        self._total_bytes = 0

    def open_rest(self, folder: Path, names: Collection[str]) -> MissingWeights | None:
        """The weights of another folder except `names`; None after a failure."""
        try:
            return MissingWeights(folder, names)
        except OSError as error:
            self._fail(error)
            return None

    def check_room(self, needed_bytes: int) -> None:
        """Fail before writing if the disk has too little space."""
        try:
            free_bytes = shutil.disk_usage(self._folder).free
        except OSError as error:
            self._fail(error)
            return
        if needed_bytes > free_bytes:
            self._fail(OSError(errno.ENOSPC, f"{needed_bytes} bytes are needed, {free_bytes} are free"))

    def write(self, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Write a bucket of tensors from `on_host`."""
        self._num_written += 1
        if self.failure is None:
            self._try(self._name(), tensors)

    def complete(self, rest: MissingWeights, bucket_bytes: int) -> None:
        """Write the missing weights."""
        buckets = rest.buckets(bucket_bytes)
        number = 0
        while self.failure is None:
            number += 1
            try:
                bucket = next(buckets, None)
            except OSError as error:
                self._fail(error)
                return
            if bucket is None:
                return
            self._try(f"rest-{number:05}.safetensors", bucket)

    def finish(self) -> list[Path]:
        """All files, the index last.

        Raises:
            PublishFailed: the first failure.
        """
        if self.failure is None and len(self._paths) > 1:
            try:
                self._write_index()
            except OSError as error:
                self._fail(error)
        if self.failure is not None:
            for path in self._paths:
                path.unlink(missing_ok=True)
            raise self.failure
        return self._paths

    def _write_index(self) -> None:
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._weight_map}
        with _replacing(self._folder / INDEX) as partial:
            partial.write_text(json.dumps(index, indent=1), encoding="utf-8")
        self._paths.append(self._folder / INDEX)

    def _name(self) -> str:
        if self._num_buckets == 1:
            return "model.safetensors"
        return f"model-{self._num_written:05}-of-{self._num_buckets:05}.safetensors"

    def _try(self, file: str, tensors: "Mapping[str, torch.Tensor]") -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            with _replacing(self._folder / file) as partial:
                save_file(dict(tensors), partial, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            self._fail(error)
            return
        self._paths.append(self._folder / file)
        self._weight_map.update(dict.fromkeys(tensors, file))
        self._total_bytes += sum(map(num_bytes, tensors.values()))

    def _fail(self, error: Exception) -> None:
        self.failure = PublishFailed(
            f"weights must be written whole to {self._folder}; writing failed: {error}; free space there, or "
            "name another folder by trainer.weights_dir, or push without files (trainer.publish); engines "
            "keep the version they have"
        )
        self.failure.__cause__ = error


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary name; renamed to `path` when the block ends, removed if it raises."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
