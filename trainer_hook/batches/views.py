"""Torch tensors over read-only memory, without a copy.

In: a numpy view of the ring. Out: a tensor on the same bytes, that keeps the view (and so its record) alive.

torch has no read-only tensors: it warns at `from_numpy` of such an array and then ignores the flag. Here the
array says of itself that it may be written, which leaves the interpreter's warning filters alone and costs
no copy. The pages stay read-only for the process: an in-place write is a segmentation fault, and faulthandler
names its line.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


class _Exported:
    """What `np.asarray` needs to see the memory of an array again, as writable; it holds the array."""

    __slots__ = ("__array_interface__", "_array")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        interface = array.__array_interface__
        address, _ = interface["data"]
        self.__array_interface__ = {**interface, "data": (address, False)}
        self._array = array


def as_tensor(array: npt.NDArray[Any]) -> "torch.Tensor":
    """A tensor that shares the memory of `array`; read it, never write to it unless the array is writable."""
    import torch

    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Exported(array)))
