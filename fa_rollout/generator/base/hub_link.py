"""The generator's end of the channel to the hub: typed messages in and out, on the event loop.

In: first the raw preamble, then messages, which are queued for `receive`. `Ping`, `Stop` and the hub's death
are handled immediately, even during startup. A spare gets only the preamble and sends nothing until `Resume`
makes it the generator.

Invariant: nothing here blocks the loop; messages arrive in the order in which they are sent.
"""

import asyncio

from fa_rollout.generator.base.life import Life
from shm.channels.channel import Channel
from shm.channels.channel_loop import LoopChannel
from trainer_hook.messages import Message, Ping, Pong, Resume, Stop, decode, encode


class HubLink:
    """Sends and receives messages; create it on the running loop."""

    def __init__(self, channel: Channel, life: Life) -> None:
        self._channel = LoopChannel(channel)
        self._life = life
        self._preamble: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._has_resume = asyncio.Event()

    def send(self, message: Message) -> None:
        """Queue a message; dropped if the hub is gone or if this process is still a spare."""
        if self._has_resume.is_set():
            self._channel.queue(encode(message))

    async def resumed(self) -> None:
        """Wait until this process is the generator."""
        await self._has_resume.wait()

    async def preamble(self) -> bytes:
        """The first frame."""
        return await asyncio.shield(self._preamble)

    async def resume(self) -> Resume:
        """Wait until this process is the generator, and return the state of the run."""
        resume = await self.receive()
        assert isinstance(resume, Resume), "the hub's first message is Resume"
        return resume

    async def receive(self) -> Message:
        """The next message, except those handled here."""
        return await self._messages.get()

    async def run(self) -> None:
        """Receive until the hub closes the channel or dies.

        Raises:
            ChannelError: the hub sent bytes that are not a message.
        """
        async for frame in self._channel:
            if not self._preamble.done():
                self._preamble.set_result(frame)
            else:
                self._take(decode(frame))
        self._life.orphan("the hub closed the channel")

    def _take(self, message: Message) -> None:
        match message:
            case Ping():
                self.send(Pong(number=message.number))
            case Stop():
                self._life.drain(message.reason, message.grace_s)
            case _:
                if isinstance(message, Resume):
                    self._has_resume.set()
                self._messages.put_nowait(message)

    async def flushed(self) -> None:
        """Wait until the kernel has all sent messages, or the channel is closed."""
        await self._channel.drain()

    def close(self) -> None:
        """Close this end."""
        self._channel.close()
