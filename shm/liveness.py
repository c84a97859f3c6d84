"""Whether another process lives, seen by pidfd: at once, and never mistaken for a later process of the same
number.

In: a process id, or a connected Unix socket. Out: a descriptor that becomes readable when that process ends.
Where the kernel or a container refuses pidfds, the answer is None, and the end of the socket's stream (or
`getppid`) stands in.
"""

import os
import select
import socket
import struct

_SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("iII")


def open_pidfd(pid: int) -> int | None:
    """A pidfd of a process, or None where pidfds are refused.

    Raises:
        ProcessLookupError: there is no such process.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):
        return None


def has_ended(pidfd: int) -> bool:
    """Whether the process of a pidfd is gone (a zombie is)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def wait_ended(pidfd: int, timeout_s: float) -> bool:
    """Wait for the end of a process; False when it still lives at the deadline."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected, listened or made the pair, at that moment."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def peer_pidfd(sock: socket.socket) -> int | None:
    """A pidfd of the process at the other end; None where that is refused, or the peer is in another
    namespace.

    Raises:
        ProcessLookupError: it has ended already.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except ProcessLookupError:
        raise
    except OSError:
        pid, _ = peer_credentials(sock)  # before Linux 6.5
        return open_pidfd(pid) if pid > 0 else None


class ParentWatch:
    """Tells when the process that started this one ends, however that comes about.

    Not PR_SET_PDEATHSIG: that follows the thread which started the child, not the process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd: int | None = None
        """Readable when the parent has ended; None where pidfds are refused, then ask `has_ended` now and
        then."""
        try:
            self.pidfd = open_pidfd(pid)
        except ProcessLookupError:
            return
        if self.pidfd is not None and os.getppid() != pid:
            os.close(self.pidfd)  # the parent ended before, and its number is another's now
            self.pidfd = None

    def has_ended(self) -> bool:
        """Whether the parent is gone."""
        return os.getppid() != self.pid if self.pidfd is None else has_ended(self.pidfd)

    def close(self) -> None:
        """Give the descriptor back; idempotent."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
