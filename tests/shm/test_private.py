"""Bytes taken out of shared memory stay as they were, at the same address."""

import mmap
import os
import threading

import numpy as np
import pytest

from shm.ring.private import make_private
from shm.ring.segment import Segment


def ranges() -> list[tuple[int, int]]:
    page = mmap.PAGESIZE
    return [(0, 1), (page - 1, 2), (page + 64, 5 * page), (64 * page - 10, 10)]


@pytest.mark.parametrize(("offset", "length"), ranges())
def test_a_private_range_no_longer_follows_the_segment(offset: int, length: int) -> None:
    with Segment.create(64 * mmap.PAGESIZE) as segment:
        segment.array[:] = 7
        reader = Segment.attach(os.dup(segment.fd), writable=False)
        view = np.frombuffer(memoryview(reader.array), np.uint8, length, offset)
        make_private(view.ctypes.data, view.size)
        segment.array[:] = 9
        assert (view == 7).all()
        pages = slice((offset + length - 1) // mmap.PAGESIZE * mmap.PAGESIZE + mmap.PAGESIZE, None)
        assert (reader.array[pages] == 9).all()
        reader.close()
    assert (view == 7).all()


def test_a_reader_never_sees_anything_but_its_bytes() -> None:
    with Segment.create(256 * mmap.PAGESIZE) as segment:
        segment.array[:] = 7
        view = segment.array
        seen = set()
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                seen.update(np.unique(view).tolist())

        thread = threading.Thread(target=read)
        thread.start()
        for start in range(0, view.size, mmap.PAGESIZE):
            make_private(view.ctypes.data + start, mmap.PAGESIZE)
        stop.set()
        thread.join()
        assert seen == {7}
