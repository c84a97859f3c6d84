"""New weights: read, checked whole, then copied into the running model.

In comes a safetensors file, a folder of them, or tensors. Nothing is changed until every name and shape is
known to fit. A tied tensor may be left out or given twice, if both are equal.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
        unknown = [name for name in tensors if name not in self._state]
        if unknown:
            raise WeightsRefused(f"names must be the model's own; unknown: {_some(unknown)}.")
        for name, tensor in tensors.items():
            expected = tuple(self._state[name].shape)
            if tuple(tensor.shape) != expected:
                raise WeightsRefused(
                    f"{name} must have shape {list(expected)}, found {list(tensor.shape)}: these are weights "
                    f"of another model."
                )
        self._check_tied(tensors)
        given = {self._tied.get(name, name) for name in tensors}
        missing = [name for name in self._state if self._tied.get(name, name) not in given]
        if missing and not allow_partial:
            raise WeightsRefused(f"a checkpoint must be whole; missing: {_some(missing)}.")

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


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a safetensors file, or all of a folder, into memory of our own as float32."""
    tensors: Tensors = {}
    files, is_partial = _files(path)
    for file in files:
        try:
            loaded = safetensors.torch.load_file(file)
        except (SafetensorError, OSError) as error:
            raise WeightsRefused(f"{file} must be a whole safetensors file: {error}") from error
        twice = [name for name in loaded if name in tensors]
        if twice:
            raise WeightsRefused(f"each tensor must be in one file of {path}; in two: {_some(twice)}.")
        # Copied: the file is mapped, and its owner may change it as soon as we answer
        tensors.update({name: tensor.to(torch.float32, copy=True) for name, tensor in loaded.items()})
    return Checkpoint(tensors=tensors, is_partial=is_partial)


def _files(path: Path) -> tuple[list[Path], bool]:
    """The files of a checkpoint, and whether its index says that they do not hold all of it."""
    if path.is_file():
        return [path], False
    index = path / "model.safetensors.index.json"
    if index.is_file():
        text = json.loads(index.read_text())
        is_partial = bool((text.get("metadata") or {}).get("partial"))
        return sorted({path / name for name in text["weight_map"].values()}), is_partial
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise WeightsRefused(
            f"model_path must be a safetensors file or a folder with some; found none at {path}."
        )
    return files, False


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
