"""The body of a request that brings a bucket of weights: made as it is sent, slice by slice.

In: a file of pickled tensors. Out: the JSON with its base64, once for each worker of an engine.
Invariant: no more than a slice is held, and none holds up the event loop: a bucket may have gigabytes.
"""

import base64
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Self

from fa_rollout.client.base.errors import ControlFailed
from fa_rollout.process.own_threads import in_thread

SLICE_BYTES = 3 << 18
"""Of the file; a multiple of 3, so that slices of base64 make one text."""
_END = b'],"flush_cache":false,"abort_all_requests":false}'
_START = b'{"serialized_named_tensors":['


class TensorFile:
    """A bucket that is sent to engines; the file may be removed meanwhile."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._fd = -1

    async def __aenter__(self) -> Self:
        """
        Raises:
            ControlFailed: it is gone.
        """
        try:
            self._fd = await in_thread(os.open, self._path, os.O_RDONLY)
        except OSError as error:  # a trainer that gave up has removed it
            raise ControlFailed(f"a bucket of weights must be there to be sent: {error}") from error
        self.num_bytes = os.fstat(self._fd).st_size
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def body(self, count: int) -> "TensorBody":
        """The body for an engine of so many workers: each takes an entry of its own, and needs all of it."""
        return TensorBody(self, count)

    async def encoded(self) -> AsyncIterator[bytes]:
        """The base64 of it, in slices."""
        for offset in range(0, self.num_bytes, SLICE_BYTES):
            yield await in_thread(self._slice, offset)

    def _slice(self, offset: int) -> bytes:
        data = os.pread(self._fd, SLICE_BYTES, offset)
        assert len(data) == min(SLICE_BYTES, self.num_bytes - offset), "a bucket must stay as it is"
        return base64.b64encode(data)


class TensorBody:
    """One request's body, to be sent any number of times."""

    def __init__(self, file: TensorFile, count: int) -> None:
        self._file = file
        self._count = count

    @property
    def num_bytes(self) -> int:
        entry = 4 * -(-self._file.num_bytes // 3) + 2
        return len(_START) + self._count * entry + self._count - 1 + len(_END)

    async def chunks(self) -> AsyncIterator[bytes]:
        """All of it, in slices."""
        yield _START
        for number in range(self._count):
            yield b',"' if number else b'"'
            async for part in self._file.encoded():
                yield part
            yield b'"'
        yield _END
