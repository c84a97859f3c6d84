"""The ring as pinned memory: copies to a GPU go straight from it, without a staging copy.

In: a mapped segment. Out: its registration with the CUDA driver, or None where there is no GPU or it
is refused; training goes on either way, only the copies are slower.

Invariant: the map stays registered while a copy may be in flight, and is unregistered before it goes.
"""

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

import torch

from shm.ring.segment import Segment

log = logging.getLogger("trainer_hook")

PORTABLE = 0x01
READ_ONLY = 0x08
_NOT_SUPPORTED = 801


class Runtime(Protocol):
    """The two calls of the CUDA runtime that are needed, as `torch.cuda.cudart()` offers them."""

    cudaHostRegister: Callable[[int, int, int], int]
    cudaHostUnregister: Callable[[int], int]


class PinnedRing:
    """A registered segment; use it inside `with`, around all use of the segment on the GPU."""

    def __init__(self, runtime: Runtime, segment: Segment, synchronize: Callable[[], None]) -> None:
        self._runtime: Runtime | None = runtime
        self._address = segment.address
        self._synchronize = synchronize

    def close(self) -> None:
        """Wait for copies in flight and give the registration back; idempotent."""
        if self._runtime is None:
            return
        runtime, self._runtime = self._runtime, None
        self._synchronize()
        code = int(runtime.cudaHostUnregister(self._address))
        if code:
            log.warning("ring_not_unpinned cuda_error=%d", code)

    def __enter__(self) -> "PinnedRing":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def pin(segment: Segment) -> PinnedRing | None:
    """Register a segment's map with the driver; None without a GPU or where that is refused."""
    if not torch.cuda.is_available():
        return None
    return register(torch.cuda.cudart(), segment, torch.cuda.synchronize)


def register(runtime: Runtime, segment: Segment, synchronize: Callable[[], None]) -> PinnedRing | None:
    """`pin` with a given runtime. The driver must be told that a map is read-only, and may refuse that."""
    flags = PORTABLE if segment.writable else PORTABLE | READ_ONLY
    code = int(runtime.cudaHostRegister(segment.address, segment.size_bytes, flags))
    if code:
        reason = (
            "read-only maps are not supported by this device" if code == _NOT_SUPPORTED else "see the code"
        )
        log.warning("ring_not_pinned cuda_error=%d reason=%s", code, reason)
        return None
    return PinnedRing(runtime, segment, synchronize)
