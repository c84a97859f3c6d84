"""A piece of shared memory without a name: a sealed memfd, handed on as a descriptor.

In: a size, or a descriptor that another process made. Out: the mapped bytes as one numpy array.
Invariant: its size never changes and its pages exist, so that no access can end in SIGBUS; the kernel frees
it when the last process that holds it is gone, however that process ended.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from shm.errors import HeadroomError, SegmentError
from shm.ring import headroom

ByteArray = npt.NDArray[np.uint8]

PAGE_BYTES = mmap.PAGESIZE
_MFD_NOEXEC_SEAL = 0x8
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_POPULATE_STRIDE = 256 << 20
"""One madvise call holds the interpreter lock: signals get their turn between two of these."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_WAY_OUT = "make the ring smaller (ring.bytes) or give the container more memory"


class Segment:
    """Mapped shared memory; `create` makes it, `attach` maps what came as a descriptor."""

    def __init__(self, fd: int, mapping: mmap.mmap, *, writable: bool) -> None:
        self.fd = fd
        """Open until `close`; send it by SCM_RIGHTS or let a child inherit it."""
        self.size_bytes = len(mapping)
        self.writable = writable
        self.array: ByteArray = np.frombuffer(mapping, np.uint8)
        """[size_bytes]; read-only where the segment was attached so."""

    @classmethod
    def create(cls, size_bytes: int, *, prefault: bool = True) -> "Segment":
        """Make a segment of zero bytes, reserved whole.

        Raises:
            HeadroomError: the machine or the cgroup has no room for it.
            SegmentError: a system call failed.
        """
        if size_bytes <= 0:
            raise ValueError(f"a segment must have at least one byte, asked for {size_bytes}")
        with _explaining("made") as opened:
            headroom.require(size_bytes, "shared memory", _WAY_OUT)
            fd = _memfd()
            opened.append(fd)
            # A memfd is born 0777. Writable descriptors are handed on; nobody gets one from a reader's.
            os.fchmod(fd, 0o400)
            os.ftruncate(fd, size_bytes)
            _reserve(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            return cls._map(
                fd, size_bytes, writable=True, populate=_MADV_POPULATE_WRITE if prefault else None
            )

    @classmethod
    def attach(cls, fd: int, *, writable: bool, prefault: bool = True) -> "Segment":
        """Map a segment that another process made; the descriptor is this object's from here on.

        Raises:
            SegmentError: the descriptor is no sealed memfd, or a system call failed.
        """
        with _explaining("attached") as opened:
            opened.append(fd)
            size_bytes = os.fstat(fd).st_size
            if size_bytes == 0 or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise SegmentError(
                    "shared memory must be sealed against a change of its size before it is mapped; "
                    f"descriptor {fd} has {size_bytes} bytes and no such seals: it is none of ours"
                )
            populate = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
            return cls._map(fd, size_bytes, writable=writable, populate=populate if prefault else None)

    @classmethod
    def _map(cls, fd: int, size_bytes: int, *, writable: bool, populate: int | None) -> "Segment":
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapping = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=protection)
        if populate is not None:
            _populate(mapping, populate)
        return cls(fd, mapping, writable=writable)

    def open_reader(self) -> int:
        """A descriptor that its holder can read and map by, and never write: for processes that only look.

        Raises:
            SegmentError: a system call failed.
        """
        with _explaining("opened for reading"):
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def address(self) -> int:
        """Address of the first byte, for registration with a device."""
        return int(self.array.ctypes.data)

    def close(self) -> None:
        """Give the descriptor and this object's hold on the map back; idempotent.

        Views stay valid: the map goes with the last of them, never under one.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.array = np.empty(0, np.uint8)

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("fa_rollout-ring", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a kernel before 6.3, which does not know the flag
            raise
        return os.memfd_create("fa_rollout-ring", flags)


def _reserve(fd: int, size_bytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise HeadroomError(
                f"no room to reserve {size_bytes:,} bytes of shared memory; {_WAY_OUT}"
            ) from error
        raise


def _populate(mapping: mmap.mmap, advice: int) -> None:
    """Map every page now: the first touch of a page costs five times a warm copy."""
    try:
        for start in range(0, len(mapping), _POPULATE_STRIDE):
            mapping.madvise(advice, start, min(_POPULATE_STRIDE, len(mapping) - start))
    except OSError:
        # Before Linux 5.14. The pages exist; a read maps them without a race against a writer's bytes.
        np.frombuffer(mapping, np.uint8)[::PAGE_BYTES].max()


_HINTS = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the machine is out of open files",
    errno.ENOSYS: "memfd needs Linux 3.17 or newer",
    errno.EPERM: "a seccomp or security profile forbids it: allow memfd_create and shared mmap",
    errno.EACCES: "a security profile forbids it: allow memfd_create and shared mmap",
    errno.ENOMEM: _WAY_OUT,
    errno.EBADF: "the descriptor was closed or never passed on",
    errno.EINVAL: "the descriptor is not a memfd",
}


@contextlib.contextmanager
def _explaining(done: str) -> Iterator[list[int]]:
    """A block that opens descriptors: if it fails they are closed, and a failed system call is explained."""
    opened: list[int] = []
    try:
        yield opened
    except BaseException as error:
        for fd in opened:
            with contextlib.suppress(OSError):
                os.close(fd)
        if not isinstance(error, OSError) or isinstance(error, SegmentError):
            raise
        hint = _HINTS.get(error.errno or 0, "see the system call's manual page")
        text = f"shared memory could not be {done}: {error.strerror or error}; {hint}"
        raise SegmentError(text) from error
