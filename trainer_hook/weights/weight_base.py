"""The files of an earlier version, to be compared with.

Invariant: what cannot be read, or is of another shape or type, counts as different.
"""

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_hook.model.index import read_header
from trainer_hook.weights.gathering import num_bytes

if TYPE_CHECKING:
    import torch

_FIRST_BYTES = 1 << 16
"""Most weights that differ do so here already, and the rest of them is not read."""


class WeightBase:
    """Weights by name, in the files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._file_of = self._read_names()
        self._names_of: dict[str, set[str]] = {}
        for name, file in self._file_of.items():
            self._names_of.setdefault(file, set()).add(name)

    @property
    def linkable(self) -> Iterable[str]:
        """Names of weights that did not differ last time either, and lie in files of their own."""
        return [name for name, file in self._file_of.items() if file.startswith("kept-")]

    def sizes_without(self, names: Collection[str]) -> dict[str, int]:
        """Bytes of the other weights that are here.

        Raises:
            OSError: they cannot be read.
        """
        try:
            kinds = {n: kind for f in self._names_of for n, kind in read_header(self._folder / f).items()}
        except ValueError as error:
            raise OSError(f"{self._folder} holds no safetensors files: {error}") from error
        if not kinds:
            raise OSError(f"{self._folder} holds no weights that a partial push could be completed by")
        return {name: kind.num_bytes for name, kind in kinds.items() if name not in names}

    def holds(self, name: str, tensor: "torch.Tensor") -> bool:
        """Whether the weight is the same here, byte by byte."""
        import torch

        if name not in self._file_of:
            return False
        old = self._found(name)
        if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
            return False
        if num_bytes(tensor) == 0:
            return True
        here, there = old.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        return torch.equal(here[:_FIRST_BYTES], there[:_FIRST_BYTES]) and torch.equal(here, there)

    def file_of(self, names: Iterable[str]) -> Path | None:
        """The file that holds these weights and no other, if there is one."""
        wanted = set(names)
        file = self._file_of.get(next(iter(wanted)))
        return self._folder / file if file is not None and self._names_of[file] == wanted else None

    def _read_names(self) -> dict[str, str]:
        index = self._folder / "model.safetensors.index.json"
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError):
            single = "model.safetensors"
            opened = self._opened(single)
            return {} if opened is None else dict.fromkeys(opened.keys(), single)
        return weight_map

    def _opened(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            try:
                self._open[file] = safe_open(self._folder / file, framework="pt")
            except (OSError, SafetensorError):
                self._open[file] = None
        return self._open[file]

    def tensor(self, name: str) -> "torch.Tensor":
        """A weight that is here.

        Raises:
            OSError: it cannot be read.
        """
        found = self._found(name)
        if found is None:
            raise OSError(f"{name} cannot be read from {self._folder}")
        return found

    def _found(self, name: str) -> "torch.Tensor | None":
        from safetensors import SafetensorError

        file = self._file_of.get(name)
        opened = None if file is None else self._opened(file)
        if opened is None:
            return None
        try:
            tensor: torch.Tensor = opened.get_tensor(name)
        except (OSError, SafetensorError):
            return None
        return tensor
