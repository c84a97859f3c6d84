"""The pickles that SGLang takes as tensors, read without the power of a pickle.

In: bytes that came over a socket. Out: named tensors by value. Invariant: what is built is lists, tuples,
numbers, texts and tensors; any other name in the pickle is refused before it is looked up.
"""

import collections
import io
import pickle
from typing import Any

import torch

from fa_rollout.engines.embedded.errors import WeightsRefused


def read_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Tensors by name, from a pickled list of (name, tensor).

    Raises:
        WeightsRefused: it is none, or holds something else.
    """
    try:
        pairs = _Unpickler(io.BytesIO(data)).load()
    except WeightsRefused:
        raise
    except Exception as error:  # a pickle that is cut or made up can raise anything
        raise WeightsRefused(f"serialized_named_tensors must be whole pickles: {error}.") from error
    are_pairs = isinstance(pairs, list) and all(isinstance(p, tuple) and len(p) == 2 for p in pairs)
    if not are_pairs or not all(isinstance(n, str) and isinstance(t, torch.Tensor) for n, t in pairs):
        raise WeightsRefused("serialized_named_tensors must be lists of (name, tensor).")
    return {name: tensor.to(torch.float32, copy=True) for name, tensor in pairs}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise WeightsRefused(
                f"serialized_named_tensors must hold tensors by value alone, found {module}.{name}: "
                "pickle them plainly, not as handles of shared memory."
            ) from None


def _storage(data: bytes) -> Any:
    storage = torch.load(io.BytesIO(data), weights_only=True)
    if not isinstance(storage, torch.storage.TypedStorage | torch.UntypedStorage):
        raise WeightsRefused(f"a tensor's storage must be one, found {type(storage).__name__}.")
    return storage


_KNOWN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("collections", "OrderedDict"): collections.OrderedDict,
}
