"""A channel inside an asyncio loop (the standard one or uvloop): messages as an async stream.

In: a `Channel`. Out: `async for payload in channel`, `queue`, `drain`.
Invariant: the loop never waits in a send; all messages queued in one turn of the loop leave in as few system
calls as the socket allows; the peer's death ends the stream after its last message.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from shm.channels.channel import Channel
from shm.errors import ChannelClosed, ChannelError


class LoopChannel:
    """A channel whose reading and writing the running loop does."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._loop = asyncio.get_running_loop()
        self._messages: deque[bytes] = deque()
        self._error: ChannelError | None = None
        self._news = asyncio.Event()
        self._sent = asyncio.Event()
        self._sent.set()
        self._flush_planned = False
        self._writing = False
        self._fd = channel.fileno()
        self._pidfd = channel.peer_pidfd
        self._loop.add_reader(self._fd, self._readable)
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._peer_ended)

    # --- receiving ----------------------------------------------------------------------------------

    def __aiter__(self) -> "LoopChannel":
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self.receive()
        except ChannelClosed:
            raise StopAsyncIteration from None

    async def receive(self) -> bytes:
        """The next message.

        Raises:
            ChannelClosed: the peer closed or died, and all it sent was received.
            ChannelError: it broke the protocol.
        """
        while not self._messages:
            if self._error is not None:
                raise type(self._error)(*self._error.args)
            self._news.clear()
            await self._news.wait()
        return self._messages.popleft()

    def _readable(self) -> None:
        try:
            self._messages += self.channel.read_ready()
        except ChannelError as error:
            self._finish(error)
        self._news.set()

    def _peer_ended(self) -> None:
        self.channel.peer_ended()
        self._readable()
        if self._error is None:
            self._readable()  # the first gave the last messages, this one the reason

    def _finish(self, error: ChannelError) -> None:
        self._error = error
        self._detach()
        self._sent.set()

    # --- sending ------------------------------------------------------------------------------------

    def queue(self, payload: bytes, *, urgent: bool = False, fds: Sequence[int] = ()) -> None:
        """Put a message in line; it leaves at the end of this turn of the loop. Dropped when the peer is
        gone.

        Raises:
            MessageTooLarge: it is beyond the limit.
            ChannelClosed: this end was closed.
        """
        self.channel.queue(payload, urgent=urgent, fds=fds)
        if self._error is None and not self._flush_planned and not self._writing:
            self._flush_planned = True
            self._sent.clear()
            self._loop.call_soon(self._flush)

    async def drain(self) -> None:
        """Wait until all that was queued is in the kernel's hands, or the peer is gone."""
        await self._sent.wait()

    def _flush(self) -> None:
        self._flush_planned = False
        if self._error is not None or self.channel.is_closed:
            return
        done = self.channel.flush()
        if done == self._writing:
            if done:
                self._loop.remove_writer(self._fd)
            else:
                self._loop.add_writer(self._fd, self._flush)
            self._writing = not done
        if done:
            self._sent.set()

    # --- ending -------------------------------------------------------------------------------------

    def _detach(self) -> None:
        # Before the close: uvloop keeps the socket alive for a reader, and the peer would see no end.
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._fd = -1
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            self._pidfd = None

    def close(self) -> None:
        """Close this end; what was not sent is dropped, see `drain`. Idempotent."""
        self._detach()
        self.channel.close()
        if self._error is None:
            self._error = ChannelClosed("the channel was closed by this process")
        self._news.set()
        self._sent.set()
