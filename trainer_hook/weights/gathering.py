"""The weights of a model, whole, in buckets of bounded size.

In: a module (plain, compiled, wrapped by DDP, sharded by FSDP2) or a mapping of names to tensors. Out: the
tensors by the names that engines know, a bucket at a time.

Invariants: never more than one bucket of whole tensors is made before it is asked for; every rank takes part
in every gathering collective, in the same order.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_INNER_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing of single layers put into the names of weights."""


class Gathering:
    """The weights of one source, to be gone through any number of times."""

    def __init__(self, source: Any, bucket_bytes: int) -> None:
        """A tensor larger than a bucket is one by itself. Raises TypeError where `source` has no tensors."""
        self._tensors = named_tensors(source)
        sizes = {name: num_bytes(tensor) for name, tensor in self._tensors.items()}
        self._plan = _plan(sizes, bucket_bytes)
        self.num_buckets = len(self._plan)
        self.sizes: Mapping[str, int] = sizes

    @property
    def device(self) -> "torch.device":
        """Where the first tensor is."""
        return next(iter(self._tensors.values())).device

    def buckets(
        self, place: "Callable[[torch.Tensor], torch.Tensor]", *, wanted: Callable[[], bool] = lambda: True
    ) -> "Iterator[dict[str, torch.Tensor]]":
        """The tensors as they are now, whole, each put where it is needed as soon as it is made.

        All ranks must go through all of it. Once tensors are not `wanted` any more, buckets come empty.
        """
        import torch

        for names in self._plan:
            bucket = {}
            with torch.no_grad():
                for name in names:
                    whole = _gathered(self._tensors[name])
                    if wanted():
                        bucket[name] = place(whole.detach())
                    del whole
            yield bucket

    def attend(self) -> None:
        """Take part in the gathering, on ranks that need no whole tensor."""
        for _ in self.buckets(lambda tensor: tensor, wanted=lambda: False):
            pass


def num_bytes(tensor: "torch.Tensor") -> int:
    return tensor.numel() * tensor.element_size()


def on_host(tensor: "torch.Tensor") -> "torch.Tensor":
    """Contiguous, on the CPU, and alone in its storage, as files and pickles demand."""
    tensor = tensor.detach().to("cpu").contiguous()
    owns_storage = tensor.untyped_storage().nbytes() == num_bytes(tensor)
    return tensor if owns_storage else tensor.clone()


def named_tensors(source: Any) -> "dict[str, torch.Tensor]":
    """Names as engines know them and the tensors, tied ones once. Raises TypeError where there are none."""
    import torch

    if isinstance(source, torch.nn.Module):
        source = _unwrapped(source).state_dict(keep_vars=True)
    if not isinstance(source, Mapping):
        raise TypeError(
            "weights must be a torch.nn.Module or a mapping of names to tensors; "
            f"found {type(source).__name__}"
        )
    tensors: dict[str, torch.Tensor] = {}
    seen = set()
    for name, value in source.items():
        if name.endswith("_extra_state"):
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"every weight must be a tensor; found {type(value).__name__} under {name!r}")
        if (key := _identity(value)) not in seen:
            seen.add(key)
            tensors[_plain_name(name)] = value
    if not tensors:
        raise TypeError("a model must have at least one tensor; found none: is this an empty state dict?")
    return tensors


def _unwrapped(module: "torch.nn.Module") -> "torch.nn.Module":
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    while True:
        if isinstance(module, DistributedDataParallel | DataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:  # the wrapper that torch.compile returns
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def _plain_name(name: str) -> str:
    for wrapper in _INNER_WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _identity(tensor: "torch.Tensor") -> object:
    """Equal for two names of the same weight. A sharded tensor, or one without storage, is only itself."""
    if _is_sharded(tensor) or tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _is_sharded(tensor: "torch.Tensor") -> bool:
    return hasattr(tensor, "full_tensor")


def _gathered(tensor: "torch.Tensor") -> "torch.Tensor":
    """A DTensor made whole (a collective: all its ranks must call it); any other tensor as it is."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def _plan(sizes: Mapping[str, int], bucket_bytes: int) -> list[list[str]]:
    """Names by bucket, in their order."""
    buckets: list[list[str]] = [[]]
    room = bucket_bytes
    for name, size in sizes.items():
        if size > room and buckets[-1]:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(name)
        room -= size
    return buckets
