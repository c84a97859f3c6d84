"""The safetensors files of one publication.

In: buckets, each small enough to hold. Out: `model.safetensors`, or several files and an index; and, where
some weights are those of the version before, the folder `changed` with links to the files of the others.

Invariants: a file has its final name only when it is whole; after a failure none is left; the folder alone
always holds every weight, once.
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
from trainer_hook.weights.weight_base import WeightBase

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
CHANGED = "changed"
"""Folder of links to the files that are new since the base, with an index that says it is not all."""


class WeightFiles:
    """Writes bucket after bucket; holds its first failure back until `finish`: others wait in collectives."""

    def __init__(self, folder: Path, num_buckets: int, *, base: Path | None = None) -> None:
        self.failure: PublishFailed | None = None
        self._folder = folder
        self._num_buckets = num_buckets
        self._num_written = 0
        self._base = WeightBase(base) if base is not None else None
        self._paths: list[Path] = []
        self._weight_map: dict[str, str] = {}
        self._kept: set[str] = set()
        """Names of files whose weights are the base's."""
        self._total_bytes = 0

    def check_room(self, sizes: Mapping[str, int], rest: WeightBase | None = None) -> None:
        """Fail before anything is written, if it cannot fit: all of it, but what can be linked to.

        `rest`: further weights come from there.
        """
        try:
            sizes = dict(sizes) | ({} if rest is None else rest.sizes_without(sizes))
        except OSError as error:
            self._fail(error)
            return
        needed_bytes = sum(sizes.values())
        if self._base is not None:
            needed_bytes -= sum(sizes.get(name, 0) for name in self._base.linkable)
        try:
            free_bytes = shutil.disk_usage(self._folder).free
        except OSError as error:
            self._fail(error)
            return
        if needed_bytes > free_bytes:
            self._fail(OSError(errno.ENOSPC, f"{needed_bytes} bytes are needed, {free_bytes} are free"))

    def write(self, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Take a bucket of tensors as `on_host` makes them."""
        self._num_written += 1
        if self.failure is not None:
            return
        kept = set() if self._base is None else {n for n, t in tensors.items() if self._base.holds(n, t)}
        try:
            self._write(self._name(), {name: t for name, t in tensors.items() if name not in kept})
            self._keep({name: t for name, t in tensors.items() if name in kept})
        except OSError as error:
            self._fail(error)

    def complete(self, rest: WeightBase, names: Collection[str], bucket_bytes: int) -> None:
        """Add the weights of another folder that are none of these `names`."""
        if self.failure is None:
            try:
                self._complete(rest, names, bucket_bytes)
            except OSError as error:
                self._fail(error)

    def _complete(self, rest: WeightBase, names: Collection[str], bucket_bytes: int) -> None:
        self._base = rest
        bucket: dict[str, torch.Tensor] = {}
        held = 0
        for name, size in rest.sizes_without(names).items():
            if bucket and held + size > bucket_bytes:
                self._keep(bucket)
                bucket, held = {}, 0
            bucket[name] = rest.tensor(name)
            held += size
        self._keep(bucket)

    def finish(self) -> list[Path]:
        """All files, the index last.

        Raises:
            PublishFailed: what went wrong on the way.
        """
        if self.failure is None:
            try:
                self._finish()
            except OSError as error:
                self._fail(error)
        if self.failure is not None:
            for path in self._paths:
                path.unlink(missing_ok=True)
            shutil.rmtree(self._folder / CHANGED, ignore_errors=True)
            raise self.failure
        return self._paths

    def _finish(self) -> None:
        new = {name: file for name, file in self._weight_map.items() if file not in self._kept}
        if self._kept and new:
            changed = self._folder / CHANGED
            changed.mkdir()
            for file in sorted(set(new.values())):
                (changed / file).symlink_to(Path("..", file))
            _write_index(changed / INDEX, new, {"partial": True})
        if len(self._paths) > 1:
            index = self._folder / INDEX
            _write_index(index, self._weight_map, {"total_size": self._total_bytes})
            self._paths.append(index)

    def _name(self) -> str:
        if self._num_buckets == 1:
            return "model.safetensors"
        return f"model-{self._num_written:05}-of-{self._num_buckets:05}.safetensors"

    def _write(self, file: str, tensors: "Mapping[str, torch.Tensor]") -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if not tensors:
            return
        try:
            with _replacing(self._folder / file) as partial:
                save_file(dict(tensors), partial, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        self._note(file, tensors)

    def _keep(self, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Link to the base's file where it holds just these weights, else write one that can be linked to."""
        assert self._base is not None or not tensors
        if self._base is None or not tensors:
            return
        file = f"kept-{len(self._kept) + 1:05}.safetensors"
        self._kept.add(file)
        whole = self._base.file_of(tensors)
        try:
            if whole is not None:
                os.link(whole, self._folder / file)
        except OSError:  # another file system, or one without links
            whole = None
        if whole is None:
            self._write(file, tensors)
        else:
            self._note(file, tensors)

    def _note(self, file: str, tensors: "Mapping[str, torch.Tensor]") -> None:
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


def _write_index(path: Path, weight_map: Mapping[str, str], metadata: Mapping[str, object]) -> None:
    with _replacing(path) as partial:
        index = {"metadata": metadata, "weight_map": weight_map}
        partial.write_text(json.dumps(index, indent=1), encoding="utf-8")


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
