"""A control connection between two processes: whole messages over a Unix stream socket.

In and out: payloads of bytes. Invariant: no call blocks on the peer alone. Sends go through an outbox and,
while they wait for room, what arrives is taken in, so that two ends that only send do not stop each other;
every wait has a deadline and ends with the peer's death. What a peer sent before it died is delivered before
its death is reported.

Blocking use (a trainer): `send`, `receive`. Loop use: `read_ready`, `queue`, `flush`; see `channel_loop`.
"""

import array
import os
import select
import socket
import time
from collections.abc import Sequence

from shm.channels.frames import MAX_MESSAGE_BYTES, FrameOutbox, Inbox
from shm.errors import ChannelClosed, ChannelError, ChannelTimeout
from shm.fork import disarm_in_children
from shm.liveness import open_pidfd, peer_credentials, peer_pidfd
from shm.statistics import ChannelStatistics

_CHUNK_BYTES = 64 << 10
_READ_LIMIT_BYTES = 4 << 20
"""Taken in by one `read_ready`, so that one talkative peer does not starve a loop."""
_INT_BYTES = array.array("i").itemsize


class Channel:
    """One end of a connection; not thread-safe."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        max_fds: int = 0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        peer_pid: int | None = None,
    ) -> None:
        """`peer_pid` names a child that inherited the other end of a pair; else the kernel tells the peer."""
        sock.setblocking(False)
        self._sock = sock
        self._max_fds = max_fds
        """Descriptors that the first message may bring; 0: the kernel drops any that come."""
        self._fds: list[int] = []
        self._scratch = memoryview(bytearray(_CHUNK_BYTES))
        self._outbox = FrameOutbox(max_message_bytes)
        self._inbox = Inbox(max_message_bytes)
        self._end: tuple[type[ChannelError], str] | None = None
        """Why nothing more will be read; raised when the inbox is empty."""
        self._broken = False
        """The peer reads no more."""
        self._num_sent = self._num_received = self._sent_bytes = self._received_bytes = 0
        self.peer_pid, self.peer_uid = peer_credentials(sock)
        self.peer_pidfd: int | None = None
        """Readable when the peer has ended; None where that cannot be known."""
        self._watch_peer(peer_pid)
        disarm_in_children(self)

    def _watch_peer(self, pid: int | None) -> None:
        try:
            if pid is not None:
                self.peer_pid, self.peer_pidfd = pid, open_pidfd(pid)
            elif self.peer_pid != os.getpid():  # a pair names its maker at both ends
                self.peer_pidfd = peer_pidfd(self._sock)
        except ProcessLookupError:
            self.peer_ended()

    # --- sending ------------------------------------------------------------------------------------

    def queue(self, payload: bytes, *, urgent: bool = False, fds: Sequence[int] = ()) -> None:
        """Put a message in line without a system call; dropped when the peer is gone, which reading tells.

        Raises:
            MessageTooLarge: it is beyond the limit.
            ChannelClosed: this end was closed.
        """
        if self.is_closed:
            raise ChannelClosed("a closed channel takes no message; it was closed by this process")
        if not self._broken:
            self._outbox.add(payload, urgent=urgent, fds=fds)

    def flush(self) -> bool:
        """Send what the socket takes now; True when nothing is left."""
        while len(self._outbox) and not self._broken:
            buffers, fds = self._outbox.batch()
            try:
                # SYNC POINT bytes-sent: a receiver sees all stores before it (pairs with bytes-received).
                sent = self._send(buffers, fds)
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                self._break()  # what the peer had sent before it left is still read
                return True
            except OSError as error:
                self._end = self._end or (ChannelError, f"the kernel refused to send: {error}")
                self._break()
                return True
            self._sent_bytes += sent
            self._num_sent += self._outbox.sent(sent)
        return True

    def _send(self, buffers: Sequence[bytes | memoryview], fds: Sequence[int]) -> int:
        if fds:
            packed = array.array("i", fds)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)
            return self._sock.sendmsg(buffers, [rights], socket.MSG_NOSIGNAL)
        if len(buffers) == 1:
            return self._sock.send(buffers[0], socket.MSG_NOSIGNAL)
        return self._sock.sendmsg(buffers, (), socket.MSG_NOSIGNAL)

    def send(
        self, payload: bytes, *, urgent: bool = False, fds: Sequence[int] = (), timeout_s: float = 60.0
    ) -> None:
        """Hand a message to the kernel, and all that was in line before it.

        Raises:
            ChannelClosed: the peer is gone; `receive` still gives what it sent before.
            ChannelTimeout: the peer reads nothing; the message stays in line.
            MessageTooLarge: it is beyond the limit.
        """
        self.queue(payload, urgent=urgent, fds=fds)
        deadline_s = time.monotonic() + timeout_s
        while not self.flush():
            self._wait(deadline_s, f"process {self.peer_pid} to read {self._outbox.num_bytes:,} bytes")
        if self._broken:
            raise ChannelClosed(
                self._end[1] if self._end else f"process {self.peer_pid} closed the connection"
            )

    @property
    def wants_write(self) -> bool:
        """Whether `flush` has something to send."""
        return len(self._outbox) > 0

    # --- receiving ----------------------------------------------------------------------------------

    def receive(self, timeout_s: float) -> bytes:
        """The next message.

        Raises:
            ChannelClosed: the peer closed or died, and all it sent was received.
            ChannelError: it sent bytes of no protocol, or passed descriptors that did not arrive.
            ChannelTimeout: nothing came.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self._inbox.messages:
            self._raise_end()
            self._wait(deadline_s, f"a message from process {self.peer_pid}")
        return self._inbox.messages.popleft()

    def read_ready(self) -> list[bytes]:
        """The messages that are there, without waiting; empty when none is whole.

        Raises:
            ChannelClosed, ChannelError: as `receive`; only when no message is left.
        """
        self._fill(_READ_LIMIT_BYTES)
        if not self._inbox.messages:
            self._raise_end()
        messages = list(self._inbox.messages)
        self._inbox.messages.clear()
        return messages

    def peer_ended(self) -> None:
        """Note that `peer_pidfd` fired: take in all that the peer sent, then the stream counts as ended.

        A forked child of the peer may hold its socket open: the end of the stream would come too late.
        """
        self._fill(None)
        if self._end is None:
            self._end = (ChannelClosed, f"process {self.peer_pid} at the other end has ended")
        self._break()

    def take_fds(self) -> list[int]:
        """Descriptors that came with the first message; the caller's to close."""
        fds, self._fds = self._fds, []
        return fds

    def _fill(self, limit_bytes: int | None) -> None:
        total = 0
        try:
            while self._end is None and (limit_bytes is None or total < limit_bytes):
                count = self._receive_some()
                if not count:
                    self._end = (ChannelClosed, self._farewell())
                    return
                total += count
                # SYNC POINT bytes-received: later loads see what the sender stored (pairs with bytes-sent).
                self._num_received += self._inbox.feed(self._scratch[:count])
                if count < _CHUNK_BYTES and limit_bytes is not None:
                    break
        except BlockingIOError:
            pass
        except ChannelError as error:
            self._end = (type(error), str(error))
        except ConnectionError:
            self._end = (ChannelClosed, self._farewell())
        finally:
            self._received_bytes += total

    def _receive_some(self) -> int:
        if self._num_received or not self._max_fds:
            return self._sock.recv_into(self._scratch)
        room = socket.CMSG_SPACE(self._max_fds * _INT_BYTES)
        count, ancillary, flags, _ = self._sock.recvmsg_into([self._scratch], room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds += array.array("i", data[: len(data) - len(data) % _INT_BYTES])
        if flags & socket.MSG_CTRUNC:
            raise ChannelError(
                f"{len(self._fds)} descriptors arrived and others did not (MSG_CTRUNC): raise the "
                f"limit of open files (ulimit -n) or let the peer pass {self._max_fds} at most"
            )
        return count

    def _farewell(self) -> str:
        rest = self._inbox.num_rest_bytes
        cut = f" in the middle of a message ({rest:,} bytes of it came)" if rest else ""
        return f"process {self.peer_pid} closed the connection{cut}"

    def _raise_end(self) -> None:
        if self._end is not None:
            kind, text = self._end
            raise kind(text)

    # --- waiting, ending ----------------------------------------------------------------------------

    def _wait(self, deadline_s: float, what: str) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | (select.POLLOUT if self.wants_write else 0))
        if self.peer_pidfd is not None:
            poll.register(self.peer_pidfd, select.POLLIN)
        ready = dict(poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000))
        if not ready:
            raise ChannelTimeout(f"waited until the deadline for {what}; it lives, see what it is busy with")
        if self.peer_pidfd in ready:
            self.peer_ended()
        if ready.get(self._sock.fileno(), 0) & ~select.POLLOUT:
            self._fill(_READ_LIMIT_BYTES)
            if self._end is not None:
                self._break()
        if self.wants_write:
            self.flush()

    def _break(self) -> None:
        self._broken = True
        self._outbox.clear()

    @property
    def is_closed(self) -> bool:
        """Whether this end was closed by its own process."""
        return self._sock.fileno() < 0

    def fileno(self) -> int:
        """The socket's descriptor, for a selector."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close this end; the peer sees the end of the stream after what was sent. Idempotent."""
        self._outbox.clear()
        for fd in self.take_fds():
            os.close(fd)
        if self.peer_pidfd is not None:
            os.close(self.peer_pidfd)
            self.peer_pidfd = None
        self._sock.close()
        self._end = self._end or (ChannelClosed, "the channel was closed by this process")

    def disarm(self) -> None:
        """Drop a forked child's copy: the child neither speaks for its parent nor holds its line open."""
        self.close()
        self._end = (
            ChannelClosed,
            "a channel belongs to the process that opened it; this one is its forked child",
        )

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> ChannelStatistics:
        """Figures since the channel began."""
        return ChannelStatistics(
            num_sent=self._num_sent,
            num_received=self._num_received,
            sent_bytes=self._sent_bytes,
            received_bytes=self._received_bytes,
            num_queued=len(self._outbox),
            queued_bytes=self._outbox.num_bytes,
        )
