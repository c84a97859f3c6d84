"""New weights: read, then copied into the running model.

In comes a folder of safetensors files, or tensors. As lenient as SGLang, lest a client be tested against more
than real engines tell it: unknown names are skipped, missing ones stay, and a tensor may be some rows short.
Nothing is changed until every shape is known to fit.
"""

import math
import stat
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from fa_rollout.engines.embedded.errors import WeightsRefused

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedWeights:
    """Checked tensors that wait to be applied."""

    tensors: Tensors
    version: str | None = None
    model_path: str | None = None


class ModelWeights:
    """The parameters of a model, by the names of its checkpoint."""

    def __init__(self, model: torch.nn.Module) -> None:
        own: Tensors = dict(model.state_dict())
        self._state = own | _views_of_files(model, own)
        first_of: dict[int, str] = {}
        self._tied: set[str] = set()
        """Further names of tensors that have one already."""
        for name, tensor in own.items():
            if first_of.setdefault(tensor.data_ptr(), name) != name:
                self._tied.add(name)

    def get(self, name: str) -> torch.Tensor | None:
        """A parameter as it is now."""
        return self._state.get(name)

    def known(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Those that the model has. The others are skipped without a word, as SGLang does; so is a tied name
        beside its first.

        Raises:
            WeightsRefused: one has another shape than the model's, and is not just some rows short.
        """
        self.check_shapes({name: tensor.shape for name, tensor in tensors.items()})
        return {n: t for n, t in tensors.items() if n in self._state and n not in self._tied}

    def check_shapes(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise WeightsRefused unless tensors of these shapes can be copied, and are of a model's size."""
        for name, shape in shapes.items():
            own = self._state.get(name)
            if own is not None and not _can_copy(shape, own.shape):
                raise WeightsRefused(
                    f"{name} must have shape {list(own.shape)}, found {list(shape)}: these are weights "
                    f"of another model."
                )
        strange = sum(math.prod(shape) for name, shape in shapes.items() if name not in self._state)
        if strange * torch.float32.itemsize > self.num_bytes:
            raise WeightsRefused("names must be the model's own; the unknown ones are more than all of it.")

    @property
    def num_bytes(self) -> int:
        """Of all of them, as float32."""
        return sum(tensor.numel() for tensor in self._state.values()) * torch.float32.itemsize

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy known tensors into the model."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                own = self._state[name]
                (own if tensor.shape == own.shape else own[: len(tensor)]).copy_(tensor)


def _views_of_files(model: torch.nn.Module, own: Tensors) -> Tensors:
    """Parts of fused parameters by the names that they have in files: experts, one by one."""
    # From transformers 5 on, which loads it with its models
    library = sys.modules.get("transformers.core_model_loading")
    convert = getattr(library, "revert_weight_conversion", None)
    if convert is None or not isinstance(model, PreTrainedModel):
        return {}
    metas = {name: tensor.to("meta") for name, tensor in own.items()}
    fused = [name for name, meta in metas.items() if convert(model, {name: meta}).get(name) is not meta]
    views = {}
    for name in fused:  # where a number of the parameter goes to is where its place goes to
        places = torch.arange(own[name].numel()).reshape(own[name].shape)
        for part, found in convert(model, {name: places}).items():
            start = int(found.flatten()[0])
            if torch.equal(found.flatten(), torch.arange(start, start + found.numel())):
                views[part] = own[name].flatten()[start : start + found.numel()].view(found.shape)
    return views


def _can_copy(shape: Sequence[int], own: Sequence[int]) -> bool:
    is_short = len(shape) == len(own) > 0 and shape[0] < own[0] and tuple(shape[1:]) == tuple(own[1:])
    return is_short or tuple(shape) == tuple(own)


def read_checkpoint(path: Path, owners: Collection[int]) -> Tensors:
    """Read all safetensors files of a folder into memory of our own as float32.

    Only a folder and files of these owners are looked at, and what is wrong with others is not told: whoever
    may name a path learns nothing about files that are no weights.
    """
    tensors: Tensors = {}
    files = _files(path, owners)
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
    return tensors


def _files(path: Path, owners: Collection[int]) -> list[Path]:
    """The files of a checkpoint."""
    files: list[Path] = []
    if _is_owned(path, owners, stat.S_ISDIR):
        index = path / "model.safetensors.index.json"
        if _is_owned(index, owners, stat.S_ISREG):
            files = [path / name for name in sorted(_read_index(index))]
        else:
            files = sorted(path.glob(f"*{_SUFFIX}"))
    if not files or not all(_is_owned(file, owners, stat.S_ISREG) for file in files):
        raise WeightsRefused(
            f"model_path must be a folder with safetensors files, both of the user whose engine this is; "
            f"{path} is none."
        )
    return files


def _is_owned(path: Path, owners: Collection[int], is_of_kind: Callable[[int], bool]) -> bool:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return False
    return found.st_uid in owners and is_of_kind(found.st_mode)


def _read_index(path: Path) -> set[str]:
    """Names of the files: in the same folder."""
    try:
        index = _INDEX.decode(path.read_bytes())
    except (OSError, RecursionError, msgspec.DecodeError) as error:
        raise WeightsRefused(f"{path} must be the index of a checkpoint.") from error
    names = set(index.weight_map.values())
    if not all(name == Path(name).name and name.endswith(_SUFFIX) for name in names):
        raise WeightsRefused(f"{path} must name safetensors files of its own folder.")
    return names


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_INDEX = msgspec.json.Decoder(_Index)
_SUFFIX = ".safetensors"


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
