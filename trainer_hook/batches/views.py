"""Zero-copy torch tensors over read-only memory.

In: a numpy view of the ring. Out: a tensor on the same bytes that keeps the view, and its record, alive.

torch has no read-only tensors: `from_numpy` warns about a read-only array and then ignores the flag. To avoid
the warning without changing warning filters, the array is exported as writable. The pages stay read-only: an
in-place write causes a segmentation fault, and faulthandler prints its line.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


class _Exported:
    """Exports an array's memory to `np.asarray` as writable, and keeps the array alive."""

    __slots__ = ("__array_interface__", "_array")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        interface = array.__array_interface__
        address, _ = interface["data"]
        self.__array_interface__ = {**interface, "data": (address, False)}
        self._array = array


def as_tensor(array: npt.NDArray[Any]) -> "torch.Tensor":
    """A tensor that shares the memory of `array`; write to it only if the array is writable."""
    import torch

    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Exported(array)))
