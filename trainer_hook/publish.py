"""Weights to files: a model or its state dict becomes safetensors that an engine loads from a folder.

In: a module (plain, compiled, wrapped by DDP, sharded by FSDP2) or a mapping of names to tensors. Out:
`model.safetensors`, or numbered files and an index, named as transformers names them.

Invariants: never more than one file's worth of gathered tensors is held; every rank takes part in every
gathering collective, also when the writer has failed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_hook.weight_files import WeightFiles, num_bytes

if TYPE_CHECKING:
    import torch

MAX_FILE_BYTES = 2 << 30
_INNER_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing of single layers put into the names of weights."""


def publish(
    source: Any, folder: str | Path, *, write: bool = True, max_file_bytes: int = MAX_FILE_BYTES
) -> list[Path]:
    """Write all weights of `source` into `folder` and return the files, the index last.

    Tensors keep their dtype. Tied weights are written once, under their first name. A tensor larger than
    `max_file_bytes` gets a file of its own.

    Args:
        source: `torch.nn.Module`, or a mapping of names to tensors such as a state dict.
        write: False on ranks that only take part in gathering sharded tensors.

    Raises:
        PublishFailed: the files could not be written (disk full); what was written of them is removed.
        TypeError: `source` holds no tensors.
    """
    import torch

    tensors = named_tensors(source)
    files = _plan({name: num_bytes(tensor) for name, tensor in tensors.items()}, max_file_bytes)
    writer = WeightFiles(Path(folder), len(files)) if write else None
    if writer is not None:
        writer.check_room(sum(map(num_bytes, tensors.values())))
    with torch.no_grad():
        for names in files:
            shard = {}
            for name in names:
                whole = _gathered(tensors[name])
                if writer is not None and writer.failure is None:
                    shard[name] = _on_host(whole)
            if writer is not None:
                writer.write(shard)
    return writer.finish() if writer is not None else []


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


def _on_host(tensor: "torch.Tensor") -> "torch.Tensor":
    """Contiguous, on the CPU, and alone in its storage, as safetensors demands."""
    tensor = tensor.detach().to("cpu").contiguous()
    owns_storage = tensor.untyped_storage().nbytes() == num_bytes(tensor)
    return tensor if owns_storage else tensor.clone()


def _plan(sizes: Mapping[str, int], max_file_bytes: int) -> list[list[str]]:
    """Names by file, in their order."""
    files: list[list[str]] = [[]]
    room = max_file_bytes
    for name, size in sizes.items():
        if size > room and files[-1]:
            files.append([])
            room = max_file_bytes
        files[-1].append(name)
        room -= size
    return files
