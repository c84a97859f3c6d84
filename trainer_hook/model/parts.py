"""The tensors of a trainer's model by the names that its files would have, wrappers taken off.

In: a module (plain, compiled, wrapped by DDP, sharded by FSDP2, with LoRA adapters) or a mapping of names to
tensors. Out: a `ModelPart` for each tensor, tied ones once.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainer_hook.model.lora import Adapters, refuse_adapter_names

if TYPE_CHECKING:
    import torch

_INNER_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What torch.compile, activation checkpointing and FSDP put into the names of weights."""
_OUTER_WRAPPER = "module."
"""What DDP puts in front of every name of its state dict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """One tensor of a model."""

    name: str
    sources: "tuple[torch.Tensor, ...]"
    """Every rank makes these whole, in this order; the first has the part's type and shape."""
    combine: "Callable[..., torch.Tensor] | None" = None
    """Makes the tensor of the whole sources; None: it is the only source."""
    aliases: tuple[str, ...] = ()
    """Further names of the same tensor."""
    is_buffer: bool = False

    @property
    def meta(self) -> "torch.Tensor":
        """Type and shape of the whole tensor, without memory."""
        import torch

        first = self.sources[0]
        return torch.empty(first.shape, dtype=first.dtype, device="meta")


def parts_of(source: Any) -> list[ModelPart]:
    """The parts of a module or a mapping, in their order.

    Raises:
        TypeError: `source` is neither, or holds something else than tensors.
        WeightsMismatch: it has adapters that cannot be merged here.
    """
    import torch

    if isinstance(source, torch.nn.Module):
        return _parts_of_module(unwrapped(source))
    if not isinstance(source, Mapping):
        raise TypeError(
            "weights must be a torch.nn.Module or a mapping of names to tensors; "
            f"found {type(source).__name__}"
        )
    parts = _named(source, buffers=())
    if all(part.name.startswith(_OUTER_WRAPPER) for part in parts):
        parts = [_without_prefix(part, _OUTER_WRAPPER) for part in parts]
    refuse_adapter_names([part.name for part in parts])
    return parts


def unwrapped(module: "torch.nn.Module") -> "torch.nn.Module":
    """The module inside of DDP and torch.compile."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    while True:
        if isinstance(module, DistributedDataParallel | DataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:  # the wrapper that torch.compile returns
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def is_sharded(tensor: "torch.Tensor") -> bool:
    return hasattr(tensor, "full_tensor")


def plain_name(name: str) -> str:
    """A name without what inner wrappers put into it."""
    for wrapper in _INNER_WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _parts_of_module(module: "torch.nn.Module") -> list[ModelPart]:
    buffers = {plain_name(name) for name, _ in module.named_buffers()}
    parts = _named(module.state_dict(keep_vars=True), buffers=buffers)
    adapters = Adapters(module, plain_name)
    return [_below(part, adapters) for part in parts if adapters.keeps(part.name)]


def _below(part: ModelPart, adapters: Adapters) -> ModelPart:
    aliases = tuple(adapters.name_below(name) for name in part.aliases if adapters.keeps(name))
    return replace(part, name=adapters.name_below(part.name), aliases=aliases, **adapters.merged(part.name))


def _named(tensors: Mapping[str, Any], *, buffers: Iterable[str]) -> list[ModelPart]:
    import torch

    first_of: dict[object, ModelPart] = {}
    for name, value in tensors.items():
        if name.endswith("_extra_state"):
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"every weight must be a tensor; found {type(value).__name__} under {name!r}")
        key, plain = _identity(value), plain_name(name)
        known = first_of.get(key)
        if known is None:
            first_of[key] = ModelPart(name=plain, sources=(value,), is_buffer=plain in buffers)
        else:
            first_of[key] = replace(known, aliases=(*known.aliases, plain))
    if not first_of:
        raise TypeError("a model must have at least one tensor; found none: is this an empty state dict?")
    return list(first_of.values())


def _identity(tensor: "torch.Tensor") -> object:
    """Equal for two names of the same weight. A sharded tensor, or one without storage, is only itself."""
    if is_sharded(tensor) or tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _without_prefix(part: ModelPart, prefix: str) -> ModelPart:
    aliases = tuple(alias.removeprefix(prefix) for alias in part.aliases)
    return replace(part, name=part.name.removeprefix(prefix), aliases=aliases)
