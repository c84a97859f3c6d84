"""The hub of a run, as its launcher sees it: what it says, and whether it still does.

In: looks, a few a second. Out: `HubReady`, `RunEnded`, notices; the hub's end. Invariant: what the hub said
before it died is heard before its death counts; one that does not answer for `limit_s` is killed, so that
whoever waits for it (ranks, generator) hears of its end as of any other.
"""

import logging
import select
import signal
import time
from collections.abc import Callable

from fa_rollout.launcher.children.child import Child
from fa_rollout.launcher.children.heartbeat import Heartbeat
from shm.channels.channel import Channel
from shm.errors import ChannelError
from trainer_hook.messages import (
    HubReady,
    Message,
    Notice,
    Ping,
    Pong,
    Progress,
    RunEnded,
    RunOpened,
    decode,
    encode,
)

logger = logging.getLogger(__name__)


class HubWatch:
    """A hub that this process started."""

    def __init__(
        self,
        child: Child,
        channel: Channel,
        *,
        limit_s: float,
        say: Callable[[str], None],
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`limit_s`: longest silence, once it has listened. `progress`: takes how the run gets on."""
        self.child = child
        self._channel: Channel | None = channel
        self._limit_s = limit_s
        self._say = say
        self._progress = progress
        self._heartbeat = Heartbeat()
        self._num_pings = 0
        self.ready: HubReady | None = None
        """Said once it listens."""
        self.is_open = False
        """The generator is ready, so that a trainer may start."""
        self.books: RunEnded | None = None
        """Said at its end."""
        self.is_gone = False
        """It is dead, and all that it said is heard."""
        self.was_silent = False
        """It was killed because it did not answer."""

    def register(self, poll: "select.poll") -> None:
        """Have a poll return when the hub says something, can hear more, or ends."""
        if self.child.pidfd is not None and self.child.exit_code is None:
            poll.register(self.child.pidfd, select.POLLIN)
        if self._channel is not None:
            wanted = select.POLLIN | (select.POLLOUT if self._channel.wants_write else 0)
            poll.register(self._channel.fileno(), wanted)

    def look(self) -> None:
        """Hear what it says, and ask whether it lives."""
        is_gone = self.child.exit_code is not None
        self._hear()
        self.is_gone = is_gone
        if self.ready is not None and self.books is None and not is_gone:
            self._watch()

    def send(self, message: Message, *, urgent: bool = False) -> None:
        """Queue a message; dropped once the hub is gone."""
        if self._channel is not None:
            self._channel.queue(encode(message), urgent=urgent)

    def close(self) -> None:
        """End it by force if it still runs; idempotent."""
        self.child.end()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _watch(self) -> None:
        if self._heartbeat.is_due(time.monotonic()):
            self._num_pings += 1
            self.send(Ping(number=self._num_pings))
        if self._heartbeat.silent_s > self._limit_s and not self.was_silent:
            self.was_silent = True
            self.child.signal(signal.SIGKILL)

    def _hear(self) -> None:
        if self._channel is None:
            return
        try:
            self._channel.flush()
            for payload in self._channel.read_ready():
                self._take(decode(payload))
        except ChannelError as error:
            # An end of file is a hint only: the hub's pidfd says when it is gone.
            logger.debug("hub_channel=closed reason=%s", error)
            self._channel.close()
            self._channel = None

    def _take(self, message: Message) -> None:
        match message:
            case HubReady():
                self.ready = message
            case RunOpened():
                self.is_open = True
            case Notice():
                self._say(message.text)
            case Progress():
                self._progress(message.text)
            case RunEnded():
                self.books = message
            case Pong():
                self._heartbeat.answered()
            case _:
                logger.warning("hub_message=%s event=unexpected", type(message).__name__)
