"""Replaces shared memory by private copies in place, under existing arrays.

In: a range of a mapping. Out: the same addresses with the same bytes, private to this process.
Invariant: a concurrent reader sees the old bytes or their copies, never a mix.
"""

import ctypes
import errno
import mmap
import os

_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MREMAP_MAYMOVE_FIXED = 1 | 2
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.mremap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]


def make_private(address: int, num_bytes: int) -> None:
    """Replace the pages of a range by private copies of themselves, in place.

    Whole pages are replaced, so that neighbours on the first and the last one are frozen too: only for a
    mapping that this process reads nothing new from.

    Raises:
        OSError: there is no memory for the copies; the range is as it was.
    """
    start = address & -mmap.PAGESIZE
    length = -(-(address + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE - start
    copies = _checked(_libc.mmap(None, length, _PROT_READ_WRITE, _PRIVATE, -1, 0))
    ctypes.memmove(copies, start, length)
    # One system call takes the old pages away and puts the copies there.
    _checked(_libc.mremap(copies, length, length, _MREMAP_MAYMOVE_FIXED, start))


def _checked(result: int) -> int:
    if result == _FAILED:
        number = ctypes.get_errno() or errno.ENOMEM
        raise OSError(number, f"private copies of shared memory could not be made: {os.strerror(number)}")
    return result
