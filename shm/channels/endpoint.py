"""Where channels begin: a listening socket that only its own user reaches, and the way to it.

In: a folder, or the path of a socket in one. Out: channels whose peer is a process of the same user.
Invariant: folder 0700, socket 0600, a name that cannot be guessed; attaching never removes a file, and the
listener removes only the one it made.
"""

import contextlib
import errno
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from shm.channels.channel import Channel
from shm.errors import AttachTimeout, ChannelError, HandshakeRefused

_MAX_PATH_BYTES = 107
_RETRY_S = 0.02
_GONE = (errno.ENOENT, errno.ECONNREFUSED)
_GONE_S = 2.0
"""An address is told once its listener listens; one that comes up under a known name takes much less."""
_BACKLOG = 512


class Listener:
    """A listening socket with the path that peers connect to."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self._sock = sock
        self.address = address
        made = os.stat(address)
        self._identity = (made.st_dev, made.st_ino)

    def fileno(self) -> int:
        """The socket's descriptor; readable when `accept` has somebody."""
        return self._sock.fileno()

    def accept(self) -> Channel:
        """The next peer; non-blocking.

        Raises:
            BlockingIOError: nobody waits.
            HandshakeRefused: the peer is of another user; it was turned away.
        """
        sock, _ = self._sock.accept()
        try:
            channel = Channel(sock)
        except BaseException:
            sock.close()
            raise
        return _of_this_user(channel)

    def close(self) -> None:
        """Stop listening and remove the socket's file, if it is still the one made here; idempotent."""
        if self._sock.fileno() < 0:
            return
        self._sock.close()
        with contextlib.suppress(FileNotFoundError):
            now = os.stat(self.address)
            if (now.st_dev, now.st_ino) == self._identity:
                os.unlink(self.address)

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def listen(directory: str | Path) -> Listener:
    """Listen in a folder, which is made if need be.

    Raises:
        ChannelError: the folder is not this user's alone.
    """
    folder = Path(directory).absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ChannelError(
            f"the folder of a control socket must belong to user {os.geteuid()} alone (mode 0700), "
            f"{folder} belongs to {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):04o}: choose another, or chmod 700 it"
        )
    address = str(folder / f"{secrets.token_hex(8)}.sock")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(
            sock.fileno(), 0o600
        )  # before the bind: the file is born with this mode, whatever the umask
        with _reachable(address) as path:
            sock.bind(path)
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        return Listener(sock, address)
    except BaseException:
        sock.close()
        raise


def connect(address: str | Path, deadline_s: float, *, max_fds: int = 1) -> Channel:
    """Connect to a listener, waiting for it to come up until `deadline_s` on the monotonic clock.

    `max_fds` descriptors may come with the first message.

    A listener that has gone (its socket is removed, or nobody listens on it) is not waited for: who comes
    while a run ends must not outlive it.

    Raises:
        AttachTimeout: nobody answers; the text says how far it came.
        HandshakeRefused: the listener is of another user.
    """
    gone_by_s = float("inf")
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            with _reachable(str(address)) as path:
                sock.connect(path)
            channel = Channel(sock, max_fds=max_fds)
            break
        except OSError as error:
            sock.close()
            stage, now_s = _stage(error), time.monotonic()
            gone_by_s = min(gone_by_s, now_s + _GONE_S) if error.errno in _GONE else float("inf")
            if now_s >= min(deadline_s, gone_by_s):
                raise AttachTimeout(f"no connection to {address} by the deadline: {stage}") from error
        except BaseException:
            sock.close()
            raise
        time.sleep(min(_RETRY_S, max(0.0, deadline_s - time.monotonic())))
    return _of_this_user(channel)


def _stage(error: OSError) -> str:
    stages = {
        errno.ENOENT: "there is no such socket; it is not started yet, its folder was removed, or the folder "
        "is not shared with this container",
        errno.ECONNREFUSED: "the socket exists and nobody listens; its process has ended, or is not ready",
        errno.EAGAIN: "it listens and does not take connections in; its process is stopped or very busy",
    }
    stage = stages.get(error.errno or 0)
    if stage is None:
        raise ChannelError(f"a control socket must be reachable, connecting failed: {error}") from error
    return stage


def _of_this_user(channel: Channel) -> Channel:
    if channel.peer_uid != os.geteuid():
        channel.close()
        raise HandshakeRefused(
            f"both ends of a control channel must be of one user, this one is of {os.geteuid()}, the "
            f"peer (process {channel.peer_pid}) of {channel.peer_uid}: start both as the same user"
        )
    return channel


@contextlib.contextmanager
def _reachable(address: str) -> Iterator[str]:
    """A path that fits a socket address: long ones go through a descriptor of their folder."""
    if len(os.fsencode(address)) <= _MAX_PATH_BYTES:
        yield address
        return
    folder, name = os.path.split(address)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)
