"""What a model's folder says of its weights: names, types and shapes, from the headers of its files alone.

In: a folder of safetensors files. Out: a `ModelIndex`, or why there is none. No tensor is read.
"""

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100 << 20
"""As the safetensors library has it."""
_HEADS = ("lm_head.weight", "embed_out.weight", "output_layer.weight")
"""What output projections are called, which engines leave out where they are tied to the embedding."""


class NoIndex(Exception):
    """A folder does not say which weights its model has; the text says why."""


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Type and shape of a weight."""

    dtype: str
    """As safetensors writes it: `BF16`."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its numbers in a file."""
        bits = re.search(r"[FIU](\d+)", self.dtype)  # of BOOL, 8
        return -(-math.prod(self.shape) * (int(bits[1]) if bits else 8) // 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIndex:
    """The weights of a model by the names that engines load."""

    folder: Path
    kinds: Mapping[str, TensorKind]
    file_of: Mapping[str, str]
    ties_head: bool
    """The output projection is the embedding: engines load it once, whatever the files hold."""

    @classmethod
    def read(cls, folder: Path) -> "ModelIndex":
        """Read the headers of a model's files.

        Raises:
            NoIndex: there are none, or they cannot be read here.
        """
        try:
            kinds: dict[str, TensorKind] = {}
            file_of: dict[str, str] = {}
            for file in _files(folder):
                for name, kind in read_header(folder / file).items():
                    kinds[name], file_of[name] = kind, file
            config = _config(folder)
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise NoIndex(f"{folder} cannot be read as a folder of safetensors files: {error}") from error
        if not kinds:
            raise NoIndex(f"{folder} holds no safetensors file")
        return cls(folder=folder, kinds=kinds, file_of=file_of, ties_head=_ties_head(config))

    def without(self, patterns: Iterable[str]) -> "ModelIndex":
        """The same without weights whose names one of the regular expressions finds."""
        found = [re.compile(pattern) for pattern in patterns]
        kept = {n: kind for n, kind in self.kinds.items() if not any(each.search(n) for each in found)}
        return replace(self, kinds=kept)

    def may_be_left_out(self, name: str) -> bool:
        """Whether engines do without this weight of the files."""
        return is_computed(name) or (self.ties_head and is_head(name))


def is_head(name: str) -> bool:
    """Whether a name is an output projection's."""
    return any(name == head or name.endswith(f".{head}") for head in _HEADS)


def is_computed(name: str) -> bool:
    """Whether a name is of a table that engines compute by themselves (rotary embeddings, causal masks)."""
    computed = ("inv_freq", "cos_cached", "sin_cached", "masked_bias", "attn.bias", "position_ids")
    return name.endswith(computed)


def read_header(path: Path) -> dict[str, TensorKind]:
    """The weights of one safetensors file.

    Raises:
        OSError, ValueError: it is none.
    """
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} has no safetensors header")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: TensorKind(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


def _files(folder: Path) -> list[str]:
    """As engines choose them: those of the index, else the single file, else all."""
    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return sorted(set(weight_map.values()))
    if (folder / SINGLE).is_file():
        return [SINGLE]
    return sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_"))


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _ties_head(config: dict[str, Any]) -> bool:
    text = config.get("text_config")
    inner = text.get("tie_word_embeddings", False) if isinstance(text, dict) else False
    return bool(config.get("tie_word_embeddings", inner))
