"""The generator's end of the channel to the hub: typed messages in and out, on the event loop.

In: first the preamble, raw; then messages, queued for whoever receives. `Ping`, `Stop` and the hub's death
are acted on as they come, also while the generator still starts. A spare has the preamble alone, and says
nothing before `Resume` has made it the generator.

Invariant: nothing here blocks the loop; what is sent arrives in order.
"""

import asyncio

from fa_rollout.generator.base.life import Life
from shm.channels.channel import Channel
from shm.channels.channel_loop import LoopChannel
from trainer_hook.messages import Message, Ping, Pong, Resume, Stop, decode, encode


class HubLink:
    """Sends and receives; made on the running loop."""

    def __init__(self, channel: Channel, life: Life) -> None:
        self._channel = LoopChannel(channel)
        self._life = life
        self._preamble: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._has_resume = asyncio.Event()

    def send(self, message: Message) -> None:
        """Queue a message; dropped when nobody reads it: the hub is gone, or this is no generator yet."""
        if self._has_resume.is_set():
            self._channel.queue(encode(message))

    async def resumed(self) -> None:
        """Return once this is the generator."""
        await self._has_resume.wait()

    async def preamble(self) -> bytes:
        """The first frame."""
        return await asyncio.shield(self._preamble)

    async def resume(self) -> Resume:
        """Where the run stands, once this is the generator."""
        resume = await self.receive()
        assert isinstance(resume, Resume), "the hub's first message is Resume"
        return resume

    async def receive(self) -> Message:
        """The next message, but for those that are acted on here."""
        return await self._messages.get()

    async def run(self) -> None:
        """Take in what the hub sends until it closes the channel or dies.

        Raises:
            ChannelError: it sent bytes that are no message.
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
        """Return once all that was sent is in the kernel's hands, or cannot be sent any more."""
        await self._channel.drain()

    def close(self) -> None:
        """Close this end."""
        self._channel.close()
