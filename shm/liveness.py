"""Detects the exit of another process by pidfd: immediately, and safe against reused process ids.

In: a process id, or a connected Unix socket. Out: a descriptor that becomes readable when the process exits.
If the kernel or a container refuses pidfds, the result is None; use the end of the socket's stream, or
`getppid`, instead.
"""

import os
import select
import socket
import struct

_SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("iII")


def open_pidfd(pid: int) -> int | None:
    """A pidfd of a process; None if pidfds are refused.

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
    """Whether the process of a pidfd has exited (also as a zombie)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def wait_ended(pidfd: int, timeout_s: float) -> bool:
    """Wait for the exit of a process; False if it is still running at the deadline."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected, listened or created the pair, at that time."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def peer_pidfd(sock: socket.socket) -> int | None:
    """A pidfd of the peer process; None if refused, or if the peer is in another namespace.

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
    """Detects the exit of the parent process.

    Not PR_SET_PDEATHSIG, which follows the thread that started the child, not the process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd: int | None = None
        """Readable when the parent has exited; None if pidfds are refused: then poll `has_ended`."""
        try:
            self.pidfd = open_pidfd(pid)
        except ProcessLookupError:
            return
        if self.pidfd is not None and os.getppid() != pid:
            os.close(self.pidfd)  # the parent exited before, and its id was reused
            self.pidfd = None

    def has_ended(self) -> bool:
        """Whether the parent has exited."""
        return os.getppid() != self.pid if self.pidfd is None else has_ended(self.pidfd)

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
