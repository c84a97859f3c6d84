"""The hub of a run, as the launcher watches it: its messages and its heartbeat.

In: a call of `look` a few times a second. Out: `HubReady`, `RunEnded`, notices; the hub's exit. Invariant:
all messages that the hub sent are read before its exit is reported. A hub that does not answer for `limit_s`
is killed, so that ranks and generator see it exit.
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
        """`limit_s`: longest time without an answer, once it listens. `progress`: prints a progress line."""
        self.child = child
        self._channel: Channel | None = channel
        self._limit_s = limit_s
        self._say = say
        self._progress = progress
        self._heartbeat = Heartbeat()
        self._num_pings = 0
        self.ready: HubReady | None = None
        """Received once it listens."""
        self.is_open = False
        """The generator is ready, so that a trainer may start."""
        self.run_ended: RunEnded | None = None
        """Received at the end of the run."""
        self.is_gone = False
        """It has exited, and all its messages are read."""
        self.was_silent = False
        """It was killed because it did not answer."""

    def register(self, poll: "select.poll") -> None:
        """Have a poll return when the hub sent a message, can receive more, or exited."""
        if self.child.pidfd is not None and self.child.exit_code is None:
            poll.register(self.child.pidfd, select.POLLIN)
        if self._channel is not None:
            wanted = select.POLLIN | (select.POLLOUT if self._channel.wants_write else 0)
            poll.register(self._channel.fileno(), wanted)

    def look(self) -> None:
        """Read its messages, and check its heartbeat."""
        is_gone = self.child.exit_code is not None
        self._read()
        self.is_gone = is_gone
        if self.ready is not None and self.run_ended is None and not is_gone:
            self._watch()

    def send(self, message: Message, *, urgent: bool = False) -> None:
        """Queue a message; dropped once the hub is gone."""
        if self._channel is not None:
            self._channel.queue(encode(message), urgent=urgent)

    def close(self) -> None:
        """Kill it if it still runs; idempotent."""
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

    def _read(self) -> None:
        if self._channel is None:
            return
        try:
            self._channel.flush()
            for payload in self._channel.read_ready():
                self._take(decode(payload))
        except ChannelError as error:
            # An end of file does not mean that the hub has exited: its pidfd does.
            logger.debug("the channel to the hub was closed: %s", error)
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
                self.run_ended = message
            case Pong():
                self._heartbeat.answered()
            case _:
                logger.warning("ignored an unexpected message from the hub: %s", type(message).__name__)
