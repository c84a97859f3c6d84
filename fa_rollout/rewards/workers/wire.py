"""Pickled objects between a runner and its own workers, over an inherited socketpair out of others' reach.

`SOCK_SEQPACKET` keeps messages whole, so that a message has exactly one reader: the worker, or the runner
that takes it back. Bytes of a message: ticket (int64), then the pickle; or the ticket alone, and the pickle
in a memfd that travels along, since a message must fit the socket's buffer.
"""

import contextlib
import os
import pickle
import socket
import struct
from typing import Any

_TICKET = struct.Struct("<q")
_INT = struct.Struct("@i")
_ANCILLARY = socket.CMSG_LEN(_INT.size)
_MAX_INLINE = 96 << 10
_MAX_MESSAGE = _MAX_INLINE + _TICKET.size


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a private connection."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MAX_MESSAGE)
    return ends


def dump(value: Any) -> bytes:
    """A value as bytes for `send`; raises whatever the value's own pickling raises."""
    return pickle.dumps(value, protocol=5)


def send(end: socket.socket, ticket: int, payload: bytes) -> None:
    """Send a payload.

    Raises:
        BlockingIOError: the end is non-blocking and its buffer is full; nothing was sent.
        BrokenPipeError, ConnectionResetError: the other side is gone.
    """
    if len(payload) <= _MAX_INLINE:
        end.sendmsg([_TICKET.pack(ticket), payload])
        return
    fd = os.memfd_create("reward")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(payload)
        socket.send_fds(end, [_TICKET.pack(ticket)], [fd])
    finally:
        os.close(fd)


def receive(end: socket.socket) -> tuple[int, bytes] | None:
    """The next message as (ticket, payload for `load`); None when the other side has closed.

    Raises:
        BlockingIOError: the end is non-blocking and nothing is there.
    """
    message = _next(end, 0)
    if message is None or message[2] is None:
        return message and message[:2]
    with open(message[2], "rb", buffering=0) as file:
        file.seek(0)
        return message[0], file.readall()


def load(payload: bytes) -> Any:
    """The value of a payload; raises whatever the value's own unpickling raises."""
    return pickle.loads(payload)


def take_back(end: socket.socket) -> list[int]:
    """Tickets of the messages that wait unread at this end, which from now on nobody will read."""
    tickets: list[int] = []
    with contextlib.suppress(BlockingIOError):
        while (message := _next(end, socket.MSG_DONTWAIT)) is not None:
            tickets.append(message[0])
            if message[2] is not None:
                os.close(message[2])
    return tickets


def _next(end: socket.socket, flags: int) -> tuple[int, bytes, int | None] | None:
    """The next message as (ticket, inline payload, memfd); not `socket.recv_fds`, which forgets its flags."""
    data, ancillary, _, _ = end.recvmsg(_MAX_MESSAGE, _ANCILLARY, flags | socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    fd = _INT.unpack_from(ancillary[0][2])[0] if ancillary else None
    return _TICKET.unpack_from(data)[0], data[_TICKET.size :], fd
