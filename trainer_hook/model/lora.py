"""LoRA adapters of PEFT: what they add to the weights of the model below, and the names of that model.

Nothing of PEFT is imported, and the trained model is not changed: a layer's base weight and its adapters are
sources of one merged tensor, as `merge_and_unload` would make it. Other adapters are refused by name.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from trainer_hook.errors import WeightsMismatch
from trainer_hook.model.listing import some

if TYPE_CHECKING:
    import torch

_PREFIX = "base_model.model."
_BASE = ".base_layer."
_MARKS = (".lora_", ".base_layer.", ".modules_to_save.", ".original_module.", ".token_adapter.")
_WAY_OUT = (
    "merge them first: `model.merge_adapter()`, push, `model.unmerge_adapter()`; or push the state dict of a "
    "merged copy"
)


class Adapters:
    """The adapters of one module; without any, every name stays and nothing is merged."""

    def __init__(self, module: "torch.nn.Module", plain_name: Callable[[str], str]) -> None:
        """
        Raises:
            WeightsMismatch: there is an adapter that cannot be merged here.
        """
        self._prefix = _PREFIX if hasattr(module, "peft_config") and hasattr(module, "base_model") else ""
        self._merged: dict[str, dict[str, Any]] = {}
        """By the name of a layer's base weight: what of its part changes."""
        self._dropped: set[str] = set()
        """Names, or what they begin with, of tensors that only adapters have."""
        self._renamed: dict[str, str] = {}
        """What names begin with, and what they begin with in the model below."""
        for path, layer in module.named_modules():
            plain = plain_name(f"{path}.").removesuffix(".")
            if _has(layer, "modules_to_save", "original_module"):
                self._take_saved(plain, layer)
            elif _has(layer, "base_layer"):
                self._take_layer(plain, layer)

    def keeps(self, name: str) -> bool:
        """Whether a tensor is, or is merged into, a weight of the model below."""
        return not any(name.startswith(start) for start in self._dropped)

    def name_below(self, name: str) -> str:
        """What the model below calls a tensor.

        Raises:
            WeightsMismatch: it has no such tensor.
        """
        plain = name
        for start, instead in self._renamed.items():
            if plain.startswith(start):
                plain = instead + plain.removeprefix(start)
        plain = plain.replace(_BASE, ".")
        below = plain.removeprefix(self._prefix)
        if not plain.startswith(self._prefix) or any(mark in f".{below}" for mark in _MARKS):
            raise _refusal([name])
        return below

    def merged(self, name: str) -> dict[str, Any]:
        """Sources of a weight and how they are combined, where adapters add to it."""
        return self._merged.get(name, {})

    def _take_saved(self, path: str, layer: Any) -> None:
        """A module that is trained whole beside the one that it replaces."""
        active = None if layer.disable_adapters else _active(layer)
        chosen = f"{path}.original_module." if not active else f"{path}.modules_to_save.{active[0]}."
        self._renamed[chosen] = f"{path}."
        copies = [f"{path}.modules_to_save.{name}." for name in layer.modules_to_save]
        self._dropped |= {start for start in [f"{path}.original_module.", *copies] if start != chosen}

    def _take_layer(self, path: str, layer: Any) -> None:
        self._dropped |= {f"{path}.{name}." for name, _ in layer.named_children() if name != "base_layer"}
        active = [] if layer.disable_adapters or layer.merged else _active(layer)
        for adapter in active:
            self._merged_by(path, layer, adapter)

    def _merged_by(self, path: str, layer: Any, adapter: str) -> None:
        pair = _pair(path, layer, adapter)
        if pair is None:
            return
        name = f"{path}.base_layer.weight"
        before = self._merged.get(name)
        sources, combine = (layer.base_layer.weight,), None
        if before is not None:
            sources, combine = before["sources"], before["combine"]
        transposes = bool(getattr(layer, "fan_in_fan_out", False)) or adapter in _embedding_down(layer)
        added = _adding(combine, layer.scaling[adapter], transposes=transposes)
        self._merged[name] = {"sources": (*sources, *pair), "combine": added}


def refuse_adapter_names(names: Iterable[str]) -> None:
    """Refuse a state dict with adapters in it: nothing there says how they are to be merged.

    Raises:
        WeightsMismatch: there are some.
    """
    found = [name for name in names if name.startswith(_PREFIX) or any(mark in name for mark in _MARKS)]
    if found:
        raise WeightsMismatch(
            f"engines know the weights of the model below alone; this state dict has names of adapters "
            f"({some(found)}): push the PEFT model itself, whose LoRA layers are merged on the way"
        )


def _pair(path: str, layer: Any, adapter: str) -> "tuple[torch.Tensor, torch.Tensor] | None":
    """The two matrices of an adapter; None where the layer has none of this name."""
    import torch

    if not hasattr(layer, "lora_A"):
        raise _refusal([f"{path} ({type(layer).__name__})"])
    if adapter in _embedding_down(layer):
        pair = (layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter])
    elif adapter in layer.lora_A:
        pair = (layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)
    else:
        return None
    variants = (
        getattr(layer, "lora_variant", {}),
        getattr(layer, "use_dora", {}),
        getattr(layer, "lora_bias", {}),
    )
    is_plain = isinstance(getattr(layer.base_layer, "weight", None), torch.Tensor) and pair[0].dim() == 2
    if not is_plain or layer.base_layer.weight.dim() != 2 or any(kind.get(adapter) for kind in variants):
        raise _refusal([f"{path} ({type(layer).__name__}, adapter {adapter!r})"])
    return pair


def _adding(
    before: "Callable[..., torch.Tensor] | None", scaling: float, *, transposes: bool
) -> "Callable[..., torch.Tensor]":
    def combine(*sources: "torch.Tensor") -> "torch.Tensor":
        *others, down, up = sources
        base = others[0] if before is None else before(*others)
        delta = (up @ down) * scaling
        return base + (delta.T if transposes else delta).to(base.device, base.dtype)

    return combine


def _embedding_down(layer: Any) -> Any:
    return getattr(layer, "lora_embedding_A", {})


def _active(layer: Any) -> list[str]:
    return list(layer.active_adapters)


def _has(layer: Any, *names: str) -> bool:
    return all(name in layer._modules for name in names)


def _refusal(names: list[str]) -> WeightsMismatch:
    return WeightsMismatch(
        f"adapters must be merged into the weights that engines know, and only LoRA of linear layers and "
        f"embeddings can be merged on the way; found {some(names)}: {_WAY_OUT}"
    )
