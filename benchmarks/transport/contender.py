"""What a contender must be, and which there are.

A contender is made in the parent, goes to two fresh processes, and becomes a producer in one and a consumer
in the other.
"""

import importlib
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from typing import Any, NamedTuple, Protocol

import torch

from benchmarks.transport.workload import Form, Group


class Received(NamedTuple):
    """A message as the trainer has it."""

    stamp_ns: int
    """When the producer began with it."""
    tensors: list[torch.Tensor]


class Producer(Protocol):
    """The generator's end."""

    def send(self, group: Group, form: Form, stamp_ns: int) -> None:
        """Hand one group over; may keep a few back until `flush`."""

    def flush(self) -> None:
        """Let all that was sent go."""

    def close(self) -> None:
        """End."""


class Consumer(Protocol):
    """The trainer's end."""

    def receive(self, form: Form) -> Received:
        """The next group, waited for."""

    def done(self) -> None:
        """The group that was received last is used no more."""

    def close(self) -> None:
        """End."""


class Contender(Protocol):
    """A transport; pickled into the two processes."""

    max_group_bytes: int
    """Larger groups it does not take."""

    def producer(self) -> Producer:
        """In the producing process."""

    def consumer(self) -> Consumer:
        """In the consuming process."""

    def helper_cpu_s(self) -> float:
        """CPU so far of processes between the two; asked in the parent."""

    def close(self) -> None:
        """In the parent, when both processes are gone."""


Make = Callable[[SpawnContext], Contender]

RING, RING_HUB, RING_SMALL, ICEORYX2 = "ring", "ring through hub", "ring of 12 MiB", "iceoryx2"
OURS = (RING, RING_HUB, RING_SMALL)
"""64 MiB, which is the default of a run, but for the one that stays in the processor's cache."""
_WHERE = {
    RING: ("ring", "direct"),
    RING_HUB: ("ring", "through_hub"),
    RING_SMALL: ("ring", "small"),
    ICEORYX2: ("zero_copy", "Iceoryx2"),
    "Ray": ("zero_copy", "Ray"),
    "mp.Queue": ("queues", "MpQueue"),
    "Pipe, pickle 5": ("queues", "Pipe"),
    "torch.multiprocessing": ("queues", "TorchQueue"),
    "pyzmq ipc": ("queues", "Zmq"),
    "faster-fifo": ("queues", "FasterFifo"),
}
NAMES = tuple(_WHERE)
_PACKAGES = {ICEORYX2: "iceoryx2", "Ray": "ray", "pyzmq ipc": "zmq", "faster-fifo": "faster_fifo"}


def missing_package(name: str) -> str | None:
    """The package that a contender needs and that is not installed."""
    package = _PACKAGES.get(name)
    if package is None or importlib.util.find_spec(package):
        return None
    return package


def make(name: str, context: SpawnContext) -> Contender:
    """A contender, ready to be sent to its processes."""
    module, attribute = _WHERE[name]
    factory: Any = getattr(importlib.import_module(f"benchmarks.transport.{module}"), attribute)
    contender: Contender = factory(context)
    return contender
