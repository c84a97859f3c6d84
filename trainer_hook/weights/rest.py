"""The weights of an earlier version, by which a partial push to files is completed.

Invariant: what cannot be read is an OSError, never a missing weight.
"""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_hook.model.index import read_header

if TYPE_CHECKING:
    import torch


class MissingWeights:
    """The weights of one folder that a push lacks."""

    def __init__(self, folder: Path, names: Collection[str]) -> None:
        """`names`: of the weights that the push has.

        Raises:
            OSError: the folder cannot be read, or holds no weights.
        """
        self._folder = folder
        self._file_of: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        """Bytes of each weight."""
        found = False
        for file in _files(folder):
            try:
                kinds = read_header(folder / file)
            except ValueError as error:
                raise OSError(f"{folder} holds no safetensors files: {error}") from error
            found = found or bool(kinds)
            for name, kind in kinds.items():
                if name not in names:
                    self._file_of[name] = file
                    self.sizes[name] = kind.num_bytes
        if not found:
            raise OSError(f"{folder} holds no weights that a partial push could be completed by")

    def buckets(self, bucket_bytes: int) -> "Iterator[dict[str, torch.Tensor]]":
        """All of them, in buckets of at most this size or of one weight.

        Raises:
            OSError: one cannot be read.
        """
        bucket: dict[str, torch.Tensor] = {}
        held = 0
        for name, size in self.sizes.items():
            if bucket and held + size > bucket_bytes:
                yield bucket
                bucket, held = {}, 0
            bucket[name] = self._read(name)
            held += size
        if bucket:
            yield bucket

    def _read(self, name: str) -> "torch.Tensor":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._folder / self._file_of[name], framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise OSError(f"{name} cannot be read from {self._folder}: {error}") from error
        return tensor


def _files(folder: Path) -> list[str]:
    """Those of the index, else the only one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"] if (folder / "model.safetensors").exists() else []
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError) as error:
        raise OSError(f"{index} is no index of safetensors files: {error}") from error
    return sorted(set(weight_map.values()))
