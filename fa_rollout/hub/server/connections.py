"""Connections of ranks and observers: greeted, listened to, dropped.

Invariant: nobody gets the ring's descriptor before user, run, token, protocol and schema are checked;
whatever a connection sends can end only that connection.
"""

import errno
import hmac
import resource
import time
from dataclasses import dataclass

from fa_rollout.hub.hub import Hub
from fa_rollout.hub.io.selector import Selector
from fa_rollout.hub.reporting.observers import Observers
from fa_rollout.hub.state.world import Attachment
from shm.channels.channel import Channel
from shm.channels.endpoint import Listener
from shm.errors import ChannelClosed, ChannelError, LeaseError
from trainer_hook import messages as m
from trainer_hook.record import schema_fingerprint

HELLO_DEADLINE_S = 10.0
MAX_STRANGERS = 64
"""Connections that have not said who they are; when there are more, the one that waits longest is closed."""
_STRANGERS_SHARE = 8
"""Part of the descriptors that they may have; each takes two."""
_TOLD_EVERY_S = 60.0
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


@dataclass(slots=True)
class HubConnection:
    """A connected rank or observer."""

    channel: Channel
    since_s: float
    pidfd: int | None
    rank: Attachment | None = None
    is_observer: bool = False
    is_expelled: bool = False

    @property
    def is_stranger(self) -> bool:
        """It has not said yet who it is."""
        return self.rank is None and not self.is_observer


class Reception:
    """The listening socket and what came through it."""

    def __init__(
        self, hub: Hub, selector: Selector, listener: Listener, *, run: str, token: str, ring_fd: int
    ) -> None:
        self._hub = hub
        self._selector = selector
        self._listener = listener
        self._run = run
        self._token = token
        self._ring_fd = ring_fd
        self._connections: dict[Channel, HubConnection] = {}
        self._tells_again_s = 0.0
        self.observers = Observers(hub.core, selector)
        selector.watch(listener, self._accept)

    def tick(self, now_s: float) -> None:
        """Turn away who connected and says nothing."""
        for connection in list(self._connections.values()):
            if connection.is_stranger and now_s - connection.since_s > HELLO_DEADLINE_S:
                self._refuse(connection, "HandshakeRefused", f"no Hello within {HELLO_DEADLINE_S:.0f} s")

    def close(self) -> None:
        """Take no further connections; those that are open end with the process."""
        self._selector.unwatch(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            channel = self._listener.accept()
        except BlockingIOError:
            return
        except (ChannelError, OSError) as error:
            self._tell(f"a connection was refused: {error}")
            if isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS:
                self._turn_away_oldest(0)
            return
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._turn_away_oldest(min(MAX_STRANGERS, limit // (2 * _STRANGERS_SHARE)))
        connection = HubConnection(channel=channel, since_s=time.monotonic(), pidfd=channel.peer_pidfd)
        self._connections[channel] = connection
        self._selector.watch(channel, lambda: self._read(connection))
        if connection.pidfd is not None:
            self._selector.watch(connection.pidfd, lambda: self._peer_died(connection))

    def _turn_away_oldest(self, most: int) -> None:
        """Make room when more than `most` wait to say who they are."""
        strangers = [one for one in self._connections.values() if one.is_stranger]
        if strangers and len(strangers) >= most:
            self._tell(f"{len(strangers)} connections said nothing; the oldest are turned away")
            self._drop(strangers[0])

    def _tell(self, text: str) -> None:
        """At most once a minute, whatever comes in."""
        now_s = time.monotonic()
        if now_s >= self._tells_again_s:
            self._tells_again_s = now_s + _TOLD_EVERY_S
            self._hub.core.warn(text)

    def _read(self, connection: HubConnection) -> None:
        try:
            for payload in connection.channel.read_ready():
                self._handle(connection, m.decode(payload))
        except ChannelClosed:
            self._drop(connection)
        except (ChannelError, LeaseError) as error:
            self._expel(connection, str(error))

    def _handle(self, connection: HubConnection, message: m.Message) -> None:
        if connection.rank is not None:
            self._hub.ranks.from_rank(connection.rank, message)
        elif connection.is_observer and isinstance(message, m.QuerySnapshot):
            if not self.observers.answer(connection.channel, message):
                raise ChannelError("an observer must read what it asks for, and this one does not")
        elif connection.is_observer and isinstance(message, m.ChangeEngines):
            self._hub.core.membership.request(message, lambda answer: self._answer(connection, answer))
        elif isinstance(message, m.Hello):
            self._greet(connection, message)
        else:
            raise ChannelError(f"the first message must be Hello, found {type(message).__name__}")

    def _answer(self, connection: HubConnection, message: m.Message) -> None:
        """An answer that took its time: who asked may be gone."""
        if connection.channel in self._connections:
            self._selector.send(connection.channel, message)

    def _greet(self, connection: HubConnection, hello: m.Hello) -> None:
        stranger = self._stranger(hello)
        if stranger is not None:
            self._refuse(connection, "HandshakeRefused", stranger)
            return
        if hello.role == "observer":
            refusal = self.observers.admit(connection.channel)
            connection.is_observer = refusal is None
            if refusal is not None:
                self._refuse(connection, "HandshakeRefused", refusal)
            return
        outcome = self._hub.ranks.hello(hello, connection.channel)
        if isinstance(outcome, m.Refused):
            self._refuse(connection, outcome.error, outcome.text)
            return
        connection.rank = outcome
        connection.channel.queue(m.encode(self._hub.ranks.welcome(outcome)), fds=(self._ring_fd,))
        self._selector.mark(connection.channel)

    def _stranger(self, hello: m.Hello) -> str | None:
        """Why a peer is none of this run; its user was checked when it was accepted."""
        if hello.run != self._run:
            return f"this hub serves run {self._run}, the peer asks for {hello.run}: check FA_ROLLOUT_RUN"
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return "the run's token does not match: pass FA_ROLLOUT_TOKEN as the launcher set it"
        if hello.protocol != m.PROTOCOL:
            found = f"this hub speaks protocol {m.PROTOCOL}, the peer {hello.protocol}"
            return f"{found}: install one release of fa_rollout for both"
        if hello.role == "rank" and hello.schema != schema_fingerprint():
            return "hub and trainer must have one record schema: install one release of fa_rollout for both"
        return None

    def _refuse(self, connection: HubConnection, error: str, text: str) -> None:
        self._selector.send(connection.channel, m.Refused(error=error, text=text))
        self._selector.flush()
        self._drop(connection)

    def _expel(self, connection: HubConnection, text: str) -> None:
        """A peer broke the protocol; the records of a rank stay until it ends, since it may read them."""
        if connection.rank is None or connection.pidfd is None:
            self._refuse(connection, "ChannelError", text)
            return
        self._selector.send(connection.channel, m.Refused(error="ChannelError", text=text))
        self._selector.flush()
        self._selector.unwatch(connection.channel)
        self._hub.core.warn(f"{connection.rank.name} broke the protocol and is heard no more: {text}")
        connection.is_expelled = True
        self._hub.ranks.gone(connection.rank, keeps_leases=True)

    def _peer_died(self, connection: HubConnection) -> None:
        if connection.is_expelled:
            self._drop(connection)
            return
        connection.channel.peer_ended()
        while connection.channel in self._connections:
            self._read(connection)

    def _drop(self, connection: HubConnection) -> None:
        if self._connections.pop(connection.channel, None) is None:
            return
        self._selector.unwatch(connection.channel)
        if connection.pidfd is not None:
            self._selector.unwatch(connection.pidfd)
        connection.channel.close()
        self.observers.left(connection.channel)
        if connection.rank is not None:
            self._hub.ranks.gone(connection.rank)
