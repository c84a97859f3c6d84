"""New weights: read, checked whole, then copied into the running model.

In comes a safetensors file, a folder of them, or tensors. Nothing is changed until every name and shape is
known to fit. A tied tensor may be left out or given twice, if both are equal.
"""

import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError

from fa_rollout.engines.embedded.errors import WeightsRefused

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Checked tensors that wait to be applied."""

    tensors: Tensors
    version: str | None = None
    model_path: str | None = None


class Weights:
    """The parameters of a model, by the names of its checkpoint."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._state: Tensors = dict(model.state_dict())
        first_of: dict[int, str] = {}
        self._tied: dict[str, str] = {}
        for name, tensor in self._state.items():
            first = first_of.setdefault(tensor.data_ptr(), name)
            if first != name:
                self._tied[name] = first

    def check(self, tensors: Mapping[str, torch.Tensor], *, allow_partial: bool) -> None:
        """Raise WeightsRefused unless `tensors` fit; a partial set only if allowed."""
        self.check_shapes({name: tensor.shape for name, tensor in tensors.items()})
        self._check_tied(tensors)
        given = {self._tied.get(name, name) for name in tensors}
        missing = [name for name in self._state if self._tied.get(name, name) not in given]
        if missing and not allow_partial:
            raise WeightsRefused(f"a checkpoint must be whole; missing: {_some(missing)}.")

    def check_shapes(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise WeightsRefused unless the model has tensors of these names and shapes."""
        unknown = [name for name in shapes if name not in self._state]
        if unknown:
            raise WeightsRefused(f"names must be the model's own; unknown: {_some(unknown)}.")
        for name, shape in shapes.items():
            expected = tuple(self._state[name].shape)
            if tuple(shape) != expected:
                raise WeightsRefused(
                    f"{name} must have shape {list(expected)}, found {list(shape)}: these are weights "
                    f"of another model."
                )

    @property
    def num_bytes(self) -> int:
        """Of all of them, as float32."""
        return sum(tensor.numel() for tensor in self._state.values()) * torch.float32.itemsize

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy checked tensors into the model."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._state[name].copy_(tensor)

    def _check_tied(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, first in self._tied.items():
            if name in tensors and first in tensors and not torch.equal(tensors[name], tensors[first]):
                raise WeightsRefused(f"{name} and {first} are tied in this model and must be equal.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a folder holds."""

    tensors: Tensors
    is_partial: bool
    """The folder says so itself: what it lacks stays as it is."""


def read_checkpoint(path: Path, owners: Collection[int]) -> Checkpoint:
    """Read all safetensors files of a folder into memory of our own as float32.

    Only a folder and files of these owners are looked at, and what is wrong with others is not told: whoever
    may name a path learns nothing about files that are no weights.
    """
    tensors: Tensors = {}
    files, is_partial = _files(path, owners)
    for file in files:
        try:
            loaded = safetensors.torch.load_file(file)
        except (SafetensorError, OSError) as error:
            raise WeightsRefused(f"{file} must be a whole safetensors file.") from error
        twice = [name for name in loaded if name in tensors]
        if twice:
            raise WeightsRefused(f"each tensor must be in one file of {path}; in two: {_some(twice)}.")
        # Copied: the file is mapped, and its owner may change it as soon as we answer
        tensors.update({name: tensor.to(torch.float32, copy=True) for name, tensor in loaded.items()})
    return Checkpoint(tensors=tensors, is_partial=is_partial)


def _files(path: Path, owners: Collection[int]) -> tuple[list[Path], bool]:
    """The files of a checkpoint, and whether its index says that they do not hold all of it."""
    files: list[Path] = []
    is_partial = False
    if _is_owned(path, owners, stat.S_ISDIR):
        index = path / "model.safetensors.index.json"
        if _is_owned(index, owners, stat.S_ISREG):
            is_partial, names = _read_index(index)
            files = [path / name for name in sorted(names)]
        else:
            files = sorted(path.glob(f"*{_SUFFIX}"))
    if not files or not all(_is_owned(file, owners, stat.S_ISREG) for file in files):
        raise WeightsRefused(
            f"model_path must be a folder with safetensors files, both of the user whose engine this is; "
            f"{path} is none."
        )
    return files, is_partial


def _is_owned(path: Path, owners: Collection[int], is_of_kind: Callable[[int], bool]) -> bool:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return False
    return found.st_uid in owners and is_of_kind(found.st_mode)


def _read_index(path: Path) -> tuple[bool, set[str]]:
    """Whether the files hold a part of the model only, and their names: in the same folder."""
    try:
        index = _INDEX.decode(path.read_bytes())
    except (OSError, RecursionError, msgspec.DecodeError) as error:
        raise WeightsRefused(f"{path} must be the index of a checkpoint.") from error
    names = set(index.weight_map.values())
    if not all(name == Path(name).name and name.endswith(_SUFFIX) for name in names):
        raise WeightsRefused(f"{path} must name safetensors files of its own folder.")
    return bool(index.metadata.get("partial")), names


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


_INDEX = msgspec.json.Decoder(_Index)
_SUFFIX = ".safetensors"


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
