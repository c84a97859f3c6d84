"""The hub's selector: what is watched, by whom it is handled, and sends that never block."""

import selectors
import socket
from collections.abc import Callable
from typing import Protocol

from shm.channels.channel import Channel
from shm.errors import ChannelError
from trainer_hook.messages import Fatal, Message, Stop, encode


class HasFileno(Protocol):
    def fileno(self) -> int: ...


Watched = int | HasFileno


class Selector:
    """Readers by file, and channels with something to send."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._unsent: set[Channel] = set()

    def watch(self, file: Watched, handler: Callable[[], None]) -> None:
        """Call `handler` whenever the file is readable."""
        self._selector.register(file, selectors.EVENT_READ, handler)

    def unwatch(self, file: Watched) -> None:
        """Forget a file; idempotent. To be called before it is closed."""
        number = file if isinstance(file, int) else file.fileno()
        if number in self._selector.get_map():
            self._selector.unregister(number)
        if isinstance(file, Channel):
            self._unsent.discard(file)

    def run_once(self, timeout_s: float) -> None:
        """Wait for readable files and call their handlers."""
        for key, mask in self._selector.select(timeout=timeout_s):
            # An earlier handler of this round may have closed it.
            if mask & selectors.EVENT_READ and self._selector.get_map().get(key.fd) is key:
                key.data()

    def send(self, channel: Channel, message: Message) -> None:
        """Queue a message; `flush` sends it. Ends of the run overtake."""
        channel.queue(encode(message), urgent=isinstance(message, Fatal | Stop))
        self._unsent.add(channel)

    def mark(self, channel: Channel) -> None:
        """Something was queued on a channel by other means."""
        self._unsent.add(channel)

    def flush(self) -> bool:
        """Send what the sockets take; True when nothing is left."""
        for channel in list(self._unsent):
            try:
                is_sent = channel.flush()
            except ChannelError:
                # The reading side reports the loss, after what the peer sent before it.
                is_sent = True
            if is_sent:
                self._unsent.discard(channel)
            self._want_write(channel, wanted=not is_sent)
        return not self._unsent

    def _want_write(self, channel: Channel, *, wanted: bool) -> None:
        key = self._selector.get_map().get(channel.fileno())
        if key is None:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        if key.events != events:
            self._selector.modify(key.fd, events, key.data)

    def watch_signals(self) -> socket.socket:
        """A socket that a signal makes readable, for `signal.set_wakeup_fd`."""
        read, write = socket.socketpair()
        read.setblocking(False)
        write.setblocking(False)
        self.watch(read, lambda: _drain(read))
        return write


def _drain(sock: socket.socket) -> None:
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        pass
