"""Weights of the previous version, which complete a partial push to files.

Invariant: an unreadable weight raises OSError and is never left out.
"""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_hook.model.index import read_header

if TYPE_CHECKING:
    import torch


class MissingWeights:
    """The weights of a folder that a push does not contain."""

    def __init__(self, folder: Path, names: Collection[str]) -> None:
        """`names`: the weights in the push.

        Raises:
            OSError: the folder cannot be read, or contains no weights.
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
        """All weights, in buckets of at most this size or of one weight.

        Raises:
            OSError: a weight cannot be read.
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
    """The files of the index, else the single file."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"] if (folder / "model.safetensors").exists() else []
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError) as error:
        raise OSError(f"{index} is no index of safetensors files: {error}") from error
    return sorted(set(weight_map.values()))
