"""The hub's body: sockets, processes and timers around `Hub`. One thread, one `select`.

Invariant: it always reads and never blocks in a send, so that no peer can hold another up; what a dead peer had
sent is handled before its death is.
"""

import hmac
import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fa_rollout.config import Config
from fa_rollout.hub.event_log import EventLog
from fa_rollout.hub.generator_life import GeneratorLife, preamble
from fa_rollout.hub.hub import Hub
from fa_rollout.hub.world import Attachment
from shm.channel import Channel
from shm.endpoint import Listener, listen
from shm.errors import ChannelClosed, ChannelError
from shm.liveness import ParentWatch
from shm.ring import RingTable
from shm.segment import Segment
from trainer_hook import messages as m
from trainer_hook.record import schema_fingerprint

TICK_S = 0.2
HELLO_DEADLINE_S = 10.0
POISON = 0xDB
"""Byte that returned records are overwritten with when `ring.poison` is set."""


@dataclass(slots=True)
class Connection:
    """A connected rank or observer."""

    channel: Channel
    since_s: float
    pidfd: int | None
    rank: Attachment | None = None
    is_observer: bool = False


class Server:
    """Runs a hub until its end."""

    def __init__(
        self,
        config: Config,
        tree: dict[str, object],
        *,
        run: str,
        token: str,
        directory: Path,
        launcher: Channel,
        parent_pid: int,
    ) -> None:
        self._config = config
        self._run = run
        self._token = token
        self._directory = directory
        self._selector = selectors.DefaultSelector()
        self._dirty: set[Channel] = set()
        self._connections: dict[Channel, Connection] = {}
        self._segment = Segment.create(config.ring.bytes)
        log_path = Path(config.run.output_dir, "events.jsonl") if config.run.output_dir else None
        self._log = EventLog(log_path)
        table = RingTable(self._segment.size_bytes, on_free=self._poison if config.ring.poison else None)
        self._hub = Hub(config, run=run, directory=directory, table=table, outbox=self, log=self._log)
        self._life = GeneratorLife(
            preamble=preamble(run, tree),
            ring_fd=self._segment.fd,
            max_restarts=config.run.generator_restarts,
        )
        self._launcher = launcher
        self._parent = ParentWatch(parent_pid)
        self._listener: Listener | None = None
        self._ending: tuple[int, str] | None = None
        self._end_by_s = 0.0
        self._last_flush_s = 0.0

    # --- life -------------------------------------------------------------------------------------

    def serve(self) -> int:
        """Run until the end; returns the exit code."""
        signal.signal(signal.SIGTERM, lambda *_: self.end(143, "the hub got SIGTERM"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno())
        self._watch(wake_read, lambda: _drain(wake_read))
        self._listener = listen(self._directory)
        self._watch(self._listener, self._accept)
        self._watch(self._launcher, self._from_launcher)
        if self._parent.pidfd is not None:
            self._watch(self._parent.pidfd, lambda: self.end(1, "the launcher died"))
        self._start_generator()
        ready = m.HubReady(address=self._listener.address, run=self._run, pid=os.getpid())
        self._to(self._launcher, ready)
        next_tick_s = 0.0
        while not self._is_over():
            for key, mask in self._selector.select(timeout=TICK_S):
                if mask & selectors.EVENT_READ:
                    key.data()
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                next_tick_s = now_s + TICK_S
                self._tick(now_s)
            self._hub.advance()
            self._flush()
        return self._finish()

    def end(self, exit_code: int, text: str) -> None:
        """Begin to end: the generator drains within the grace, then all is closed."""
        if self._ending is not None:
            return
        grace_s = float(self._config.run.grace_s) if exit_code == 0 else 1.0
        self._ending = (exit_code, text)
        self._end_by_s = time.monotonic() + grace_s
        self._life.next_start_s = None
        self.to_generator(m.Stop(grace_s=grace_s, reason=text))

    def _is_over(self) -> bool:
        if self._ending is None:
            return False
        return self._life.pid is None or time.monotonic() >= self._end_by_s

    def _finish(self) -> int:
        assert self._ending is not None
        exit_code, text = self._ending
        if self._life.pid is not None:
            self._life.kill()
            self._end_generator()
        counts = self._hub.counts()
        self._log.write("ended", exit_code=exit_code, text=text, counts=counts)
        self._log.close()
        self._to(self._launcher, m.RunEnded(exit_code=exit_code, text=text, counts=counts))
        deadline_s = time.monotonic() + 1.0
        while self._dirty and time.monotonic() < deadline_s:
            self._flush()
            self._selector.select(timeout=0.01)
        if self._listener is not None:
            self._listener.close()
        shutil.rmtree(self._hub.weights_dir, ignore_errors=True)
        return exit_code

    def _poison(self, position: int, length: int) -> None:
        offset = position % self._segment.size_bytes
        self._segment.array[offset : offset + length] = POISON

    # --- sends (the hub's outbox) -----------------------------------------------------------------

    def to_rank(self, rank: Attachment, message: m.Message) -> None:
        """Queue a message for a rank."""
        self._to(rank.connection, message)

    def to_generator(self, message: m.Message) -> None:
        """Queue a message for the generator."""
        self._life.send(message)
        if self._life.channel is not None:
            self._dirty.add(self._life.channel)

    def _to(self, channel: Channel, message: m.Message) -> None:
        channel.queue(m.encode(message), urgent=isinstance(message, m.Fatal))
        self._dirty.add(channel)

    def _flush(self) -> None:
        for channel in list(self._dirty):
            try:
                is_sent = channel.flush()
            except ChannelError:
                # The reading side of the same event reports the loss, after what was sent before it is read.
                is_sent = True
            if is_sent:
                self._dirty.discard(channel)
            self._want_write(channel, wanted=not is_sent)

    def _want_write(self, channel: Channel, *, wanted: bool) -> None:
        if channel.fileno() not in self._selector.get_map():
            return
        key = self._selector.get_key(channel.fileno())
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        if key.events != events:
            self._selector.modify(channel.fileno(), events, key.data)

    # --- ranks ------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            channel = self._listener.accept()
        except BlockingIOError:
            return
        except ChannelError as error:
            self._hub.warn(f"a connection was refused: {error}")
            return
        connection = Connection(channel=channel, since_s=time.monotonic(), pidfd=channel.peer_pidfd)
        self._connections[channel] = connection
        self._watch(channel, lambda: self._from_connection(connection))
        if connection.pidfd is not None:
            self._watch(connection.pidfd, lambda: self._peer_died(connection))

    def _from_connection(self, connection: Connection) -> None:
        if connection.channel not in self._connections:
            return
        try:
            for payload in connection.channel.read_ready():
                self._handle(connection, m.decode(payload))
        except ChannelClosed:
            self._drop(connection)
        except ChannelError as error:
            self._refuse(connection, "ChannelError", str(error))

    def _handle(self, connection: Connection, message: m.Message) -> None:
        if connection.rank is not None:
            self._hub.from_rank(connection.rank, message)
        elif connection.is_observer and isinstance(message, m.Query):
            value = self._hub.statistics() if message.what == "statistics" else None
            self._to(connection.channel, m.Reply(request=message.request, value=value))
        elif isinstance(message, m.Hello):
            self._greet(connection, message)
        else:
            self._refuse(connection, "HandshakeRefused", "the first message must be Hello")

    def _greet(self, connection: Connection, hello: m.Hello) -> None:
        text = self._stranger(hello)
        if text is not None:
            self._refuse(connection, "HandshakeRefused", text)
            return
        if hello.role == "observer":
            connection.is_observer = True
            self._to(connection.channel, m.Reply(request=0, value=self._run))
            return
        outcome = self._hub.hello(hello, connection.channel)
        if isinstance(outcome, m.Refused):
            self._refuse(connection, outcome.error, outcome.text)
            return
        connection.rank = outcome
        self._dirty.add(connection.channel)
        connection.channel.queue(m.encode(self._hub.welcome(outcome)), fds=(self._segment.fd,))

    def _stranger(self, hello: m.Hello) -> str | None:
        """Why a peer is none of this run; its user was checked when it was accepted."""
        if hello.run != self._run:
            return f"this hub serves run {self._run}, the peer asks for run {hello.run}: check FA_ROLLOUT_RUN"
        if not hmac.compare_digest(hello.token, self._token):
            return "the run's token does not match: pass FA_ROLLOUT_TOKEN as the launcher set it"
        if hello.protocol != m.PROTOCOL:
            return f"this hub speaks protocol {m.PROTOCOL}, the peer {hello.protocol}: install one release of fa_rollout"
        if hello.role == "rank" and hello.schema != schema_fingerprint():
            return "hub and trainer must have the same record schema: install one release of fa_rollout"
        return None

    def _refuse(self, connection: Connection, error: str, text: str) -> None:
        self._to(connection.channel, m.Refused(error=error, text=text))
        self._flush()
        self._drop(connection)

    def _peer_died(self, connection: Connection) -> None:
        connection.channel.peer_ended()
        while connection.channel in self._connections:
            self._from_connection(connection)

    def _drop(self, connection: Connection) -> None:
        if self._connections.pop(connection.channel, None) is None:
            return
        self._unwatch(connection.channel)
        self._dirty.discard(connection.channel)
        if connection.pidfd is not None:
            self._unwatch(connection.pidfd)
        connection.channel.close()
        if connection.rank is not None:
            self._hub.rank_gone(connection.rank)

    # --- the generator ----------------------------------------------------------------------------

    def _start_generator(self) -> None:
        channel = self._life.start(self._hub.resume_message())
        self._dirty.add(channel)
        self._watch(channel, lambda: self._from_generator(channel))
        if self._life.pidfd is not None:
            self._watch(self._life.pidfd, self._generator_died)

    def _from_generator(self, channel: Channel) -> None:
        try:
            for payload in channel.read_ready():
                message = m.decode(payload)
                self._life.last_heard_s = time.monotonic()
                self._life.is_ready |= isinstance(message, m.GeneratorReady)
                self._hub.from_generator(message)
        except ChannelClosed:
            # A hint: its death is its pidfd. Without one, the heartbeat decides.
            self._life.is_drained = True
            self._unwatch(channel)
        except ChannelError as error:
            self._life.is_drained = True
            self._unwatch(channel)
            self._hub.warn(f"the generator broke the protocol and is replaced: {error}")
            self._life.kill()

    def _generator_died(self) -> None:
        channel = self._life.channel
        if channel is not None:
            channel.peer_ended()
            while not self._life.is_drained:
                self._from_generator(channel)
        how = self._end_generator()
        if self._ending is None:
            will_restart = self._life.plan_restart(time.monotonic())
            self._hub.generator_gone(how, will_restart=will_restart)
            self._start_due_generator(time.monotonic())

    def _start_due_generator(self, now_s: float) -> None:
        if self._life.next_start_s is not None and now_s >= self._life.next_start_s:
            self._start_generator()

    def _end_generator(self) -> str:
        if self._life.channel is not None:
            self._unwatch(self._life.channel)
            self._dirty.discard(self._life.channel)
        if self._life.pidfd is not None:
            self._unwatch(self._life.pidfd)
        return self._life.reap()

    # --- launcher and timers ----------------------------------------------------------------------

    def _from_launcher(self) -> None:
        try:
            for payload in self._launcher.read_ready():
                message = m.decode(payload)
                if isinstance(message, m.Stop):
                    self.end(0, message.reason)
                    self._end_by_s = time.monotonic() + message.grace_s
        except ChannelError:
            self._unwatch(self._launcher)
            self.end(1, "the launcher is gone")

    def _tick(self, now_s: float) -> None:
        self._hub.tick(now_s)
        self._start_due_generator(now_s)
        life = self._life
        if life.pid is not None and life.is_silent(now_s, float(self._config.run.heartbeat_s)):
            self._hub.warn(
                f"the generator was silent for {self._config.run.heartbeat_s:.0f} s and is replaced"
            )
            life.kill()
        for connection in list(self._connections.values()):
            if connection.rank is None and not connection.is_observer:
                if now_s - connection.since_s > HELLO_DEADLINE_S:
                    self._refuse(connection, "HandshakeRefused", f"no Hello within {HELLO_DEADLINE_S:.0f} s")
        if self._hub.is_complete:
            self.end(0, "the run is complete")
        if now_s - self._last_flush_s > 1.0:
            self._last_flush_s = now_s
            self._log.flush()
            if self._log.failure is not None:
                self._hub.warn(self._log.failure)
                self._log.failure = None

    def _watch(self, file: int | socket.socket | Channel | Listener, handler: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, handler)

    def _unwatch(self, file: int | Channel) -> None:
        number = file if isinstance(file, int) else file.fileno()
        if number in self._selector.get_map():
            self._selector.unregister(number)


def _drain(wake: socket.socket) -> None:
    try:
        while wake.recv(4096):
            pass
    except BlockingIOError:
        pass
