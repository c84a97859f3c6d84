"""A few numbers of what was pushed, for engines to be asked what they hold: `success` says nothing.

In: whole tensors as they go out. Out: `Probe`s. Small tensors that differ from what engines start with are
preferred: only those show that something was loaded. Tensors that engines keep fused with others are left
alone, since some read them back wrongly, and large ones, since SGLang makes a list of the whole of one.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer_hook.messages import Probe
from trainer_hook.model.index import ModelIndex

if TYPE_CHECKING:
    import torch

_FUSED = re.compile(
    r"[qkv]_proj|qkv|query_key_value|c_attn|W_pack|in_proj|_a_proj|gate_proj|up_proj|gate_up|experts|\.w[13]\."
)
_MAX_ELEMENTS = 1 << 24
_NUM_VALUES = 256
_NUM_PROBES = 3
_ROUNDINGS = ("float32", "bfloat16", "float16")
"""Engines hold weights as one of these, whatever they were pushed as."""


class Probes:
    """Chooses among the tensors of one push."""

    def __init__(self, index: ModelIndex | None) -> None:
        """`index`: of the model that engines start with; without one, nothing is known to differ."""
        self._index = index
        self._open: dict[str, Any] = {}
        self._found: list[tuple[bool, int, Probe]] = []

    @property
    def chosen(self) -> list[Probe]:
        return [probe for _, _, probe in self._found]

    def look(self, bucket: "Mapping[str, torch.Tensor]") -> None:
        """Consider the tensors of a bucket."""
        for name, tensor in bucket.items():
            if not _FUSED.search(name) and _is_readable(tensor):
                self._consider(name, tensor)

    def _consider(self, name: str, tensor: "torch.Tensor") -> None:
        values = _start(tensor)
        before = self._before(name, tensor)
        differs = before is not None and before["bfloat16"] != values["bfloat16"]
        probe = Probe(
            name=name,
            num_rows=len(values["float32"]) if tensor.dim() == 1 else 1,
            values=values,
            before=before["float32"] if before is not None and differs else [],
        )
        self._found.append((not differs, tensor.numel(), probe))
        self._found.sort(key=lambda entry: entry[:2])
        del self._found[_NUM_PROBES:]

    def _before(self, name: str, tensor: "torch.Tensor") -> dict[str, list[float]] | None:
        from safetensors import SafetensorError, safe_open

        if self._index is None or name not in self._index.file_of:
            return None
        file = self._index.file_of[name]
        try:
            if file not in self._open:
                self._open[file] = safe_open(self._index.folder / file, framework="pt")
            return _start(self._open[file].get_slice(name)[: 1 if tensor.dim() > 1 else _NUM_VALUES])
        except (OSError, SafetensorError):
            return None


def _is_readable(tensor: "torch.Tensor") -> bool:
    is_plain = tensor.is_floating_point() and tensor.element_size() > 1
    return is_plain and tensor.dim() in (1, 2) and 0 < tensor.numel() <= _MAX_ELEMENTS


def _start(tensor: "torch.Tensor") -> dict[str, list[float]]:
    """The first numbers of the first row, in every rounding."""
    import torch

    row = (tensor if tensor.dim() == 1 else tensor[0])[:_NUM_VALUES].detach().to("cpu", torch.float32)
    return {name: row.to(getattr(torch, name)).float().tolist() for name in _ROUNDINGS}
