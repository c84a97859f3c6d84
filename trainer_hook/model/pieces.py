"""What is handed over together: one or several tensors of a model, and the weights that files have for them.

From transformers 5 on a model's own names may differ from those in its files, which engines know: experts are
one tensor in memory and many in files. `save_pretrained` converts them back; so does this, a few at a time.
Invariant: transformers is never imported here: where a model is one of its own, it is loaded already.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer_hook.errors import WeightsMismatch
from trainer_hook.model.parts import ModelPart, parts_of, unwrapped

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some parts and the weights that are made of them."""

    parts: tuple[ModelPart, ...]
    outputs: "Mapping[str, torch.Tensor]"
    """Their types and shapes, as tensors without memory."""
    convert: "Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None" = None
    """Makes the weights of the parts; None: the part is the weight."""
    sent_as: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names under which a weight is sent, where it is not its own alone."""

    def make(self, wholes: "Sequence[torch.Tensor]") -> "dict[str, torch.Tensor]":
        """The weights by the names that they are sent under, of all sources of all parts, in order."""
        left = list(wholes)
        tensors = {}
        for part in self.parts:
            sources, left = left[: len(part.sources)], left[len(part.sources) :]
            tensors[part.name] = sources[0] if part.combine is None else part.combine(*sources)
        made = tensors if self.convert is None else self.convert(tensors)
        return {sent: made[name] for name in made for sent in self.sent_as.get(name, (name,))}


def plain_pieces(parts: Sequence[ModelPart]) -> list[Piece]:
    """Each part by itself, under its own name."""
    return [Piece(parts=(part,), outputs={part.name: part.meta}) for part in parts]


def pieces_of(source: Any) -> tuple[list[Piece], list[Piece] | None]:
    """The pieces of a module or a mapping: by its own names, and by those of its files where they differ.

    Raises:
        TypeError: `source` is neither, or holds something else than tensors.
        WeightsMismatch: it has adapters, or weights, that cannot be converted here.
    """
    parts = parts_of(source)
    revert = _reversion(source)
    return plain_pieces(parts), None if revert is None else _converted(parts, revert)


def ignored_names(source: Any) -> list[str]:
    """Regular expressions of weights in the files of a transformers model that the model does not have."""
    return list(getattr(_below_adapters(source), "_keys_to_ignore_on_load_unexpected", None) or [])


def _reversion(source: Any) -> "Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None":
    """From a transformers model's own names to those of its files; None for anything else."""
    library = sys.modules.get("transformers.core_model_loading")
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    convert = getattr(library, "revert_weight_conversion", None)
    model = _below_adapters(source)
    if base is None or convert is None or not isinstance(model, base):
        return None

    def revert(tensors: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        try:
            return dict(convert(model, tensors))
        except Exception as error:  # whatever a conversion of some model stumbles over: it is refused
            names = ", ".join(list(tensors)[:3])
            raise WeightsMismatch(
                f"transformers must convert {type(model).__name__}'s weights to the names of its files, and "
                f"failed at {names}: {type(error).__name__}: {error}; push a state dict with the names of "
                "the files"
            ) from error

    return revert


def _below_adapters(source: Any) -> Any:
    import torch

    if not isinstance(source, torch.nn.Module):
        return source
    module = unwrapped(source)
    is_peft = hasattr(module, "peft_config") and hasattr(module, "get_base_model")
    return module.get_base_model() if is_peft else module  # type: ignore[operator]


def _converted(
    parts: Sequence[ModelPart], revert: "Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]"
) -> list[Piece] | None:
    """Pieces by the names of the files, as small as conversion allows; None where the names are the same."""
    metas = {part.name: part.meta for part in parts}
    whole = revert(dict(metas))
    if all(whole.get(name) is meta for name, meta in metas.items()):
        return None
    alone: dict[str, bool] = {}
    """By the form of a name: whether one part of this form is converted by itself."""
    pieces: list[Piece] = []
    joint: dict[str, list[ModelPart]] = {}
    for part in parts:
        form = re.sub(r"\d+", "#", part.name)
        if form not in alone:
            alone[form] = _is_made_alone(part.name, metas[part.name], whole, revert)
        if alone[form]:
            pieces.append(_piece([part], revert))
        else:
            joint.setdefault(_layer(part.name), []).append(part)
    return pieces + [_piece(group, revert) for group in joint.values()]


def _is_made_alone(
    name: str,
    meta: "torch.Tensor",
    whole: "dict[str, torch.Tensor]",
    revert: "Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]",
) -> bool:
    """Whether the same becomes of a part by itself as among all."""
    try:
        made = revert({name: meta})
    except WeightsMismatch:
        return False
    is_same = all(key in whole and whole[key].shape == tensor.shape for key, tensor in made.items())
    return is_same and sum(tensor.numel() for tensor in made.values()) == meta.numel()


def _piece(
    parts: Sequence[ModelPart], revert: "Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]"
) -> Piece:
    metas = {part.name: part.meta for part in parts}
    outputs = revert(dict(metas))
    is_plain = all(outputs.get(name) is meta for name, meta in metas.items())
    return Piece(parts=tuple(parts), outputs=outputs, convert=None if is_plain else revert)


def _layer(name: str) -> str:
    """What a name begins with, up to its first number: weights that are converted together are of one."""
    found = re.match(r".*?\.\d+\.", name)
    return found.group() if found else ""
