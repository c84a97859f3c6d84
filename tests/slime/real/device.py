"""A device for slime's registry, so that its engine actors find one on a machine without a GPU."""

from typing import Any

import torch
from slime.utils.accelerator import register_accelerator
from slime.utils.accelerator.base import Accelerator


def _nothing(self: Any, *args: Any) -> None:
    return None


_SILENT = ("set_device", "synchronize", "current_stream", "empty_cache")


class Processor(Accelerator):
    name = device_type = "cpu"
    communication_backend_name = "gloo"
    visible_devices_env = "FA_ROLLOUT_NO_DEVICES"

    def is_available(self) -> bool:
        return True

    def device(self, index: Any = None) -> torch.device:
        return torch.device("cpu")

    def device_name(self, index: Any = None) -> str:
        return "cpu"

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 0, 0

    def memory_allocated(self, device: Any = None) -> int:
        return 0

    def memory_reserved(self, device: Any = None) -> int:
        return 0


for silent in _SILENT:
    setattr(Processor, silent, _nothing)
Processor.__abstractmethods__ = frozenset()
register_accelerator("cpu", Processor, lambda: True, priority=1, communication_backends=("gloo",))
