"""Finished groups on their way into the ring, first come first served.

In: records. Out: `Commit` messages, in the order of the records' arrival. A record that finds no room waits
here, in this process's memory, and holds the dispatch of new groups; the event loop goes on.

Invariant: a claim is opened, filled and committed without a pause in between, so the lowest open claim is
always the head, and a group is in the ring whole or not at all.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from shm import Descriptor, Field, RingWriter
from shm.errors import RecordTooLarge, RingFull
from trainer_hook.messages import Commit


class Writable(Protocol):
    """A group ready for the ring."""

    @property
    def head(self) -> bytes: ...

    @property
    def fields(self) -> tuple[Field, ...]: ...

    def fill(self, arrays: Sequence[npt.NDArray[Any]]) -> None: ...

    def commit_message(self, descriptor: Descriptor, lowest_open: int) -> Commit: ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    record: Writable
    written: "asyncio.Future[None]"


class Outbox:
    """Writes records in order, and keeps those that have to wait."""

    def __init__(
        self,
        writer: RingWriter,
        *,
        send: Callable[[Commit], None],
        on_backlog: Callable[[bool], None],
    ) -> None:
        self._writer = writer
        self._send = send
        self._on_backlog = on_backlog
        self._queue: deque[_Waiting] = deque()
        self.num_written = 0

    @property
    def num_waiting(self) -> int:
        """Groups that wait for room."""
        return len(self._queue)

    async def put(self, record: Writable) -> None:
        """Return once the record is committed. Cancelled while it waits, it leaves no trace; a commit stands.

        Raises:
            RecordTooLarge: the ring could never hold it.
        """
        if not self._queue and self._write(record):
            return
        waiting = _Waiting(record=record, written=asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._on_backlog(True)
        try:
            await waiting.written
        except asyncio.CancelledError:
            if not waiting.written.cancelled():
                return  # written just before the cancellation
            if waiting in self._queue:
                self._queue.remove(waiting)
                self._drain()
            raise

    def set_tail(self, position: int) -> None:
        """The ring is free up to this position."""
        self._writer.set_tail(position)
        self._drain()

    def _drain(self) -> None:
        while self._queue:
            first = self._queue[0]
            if not first.written.cancelled():
                try:
                    if not self._write(first.record):
                        return
                except RecordTooLarge as error:
                    first.written.set_exception(error)
                else:
                    first.written.set_result(None)
            self._queue.popleft()
        self._on_backlog(False)

    def _write(self, record: Writable) -> bool:
        """Write and announce a record; False when there is no room for it now."""
        try:
            claim = self._writer.claim(record.head, record.fields)
        except RingFull:
            return False
        with claim:
            record.fill(claim.arrays)
            descriptor = claim.commit()
        self.num_written += 1
        self._send(record.commit_message(descriptor, self._writer.lowest_open))
        return True
