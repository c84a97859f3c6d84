"""Views and their records: across threads, forks, exits and the order in which things are dropped."""

import gc
import subprocess
import sys
import textwrap
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch

from shm import Descriptor, Field, RingReader, RingWriter
from shm.errors import LeaseError
from shm.ring.segment import Segment

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


class Source:
    """A ring with one record of a thousand ascending numbers."""

    def __init__(self) -> None:
        self.segment = Segment.create(1 << 16)
        writer = RingWriter(self.segment, run=1, schema=2, incarnation=1, head=0, tail=0, sequence=5)
        with writer.claim(b"", [Field("<i4", (1000,))]) as claim:
            claim.arrays[0][:] = np.arange(1000)
            self.descriptor: Descriptor = claim.commit()
        self.reader = RingReader(self.segment, run=1, schema=2)
        self.released: deque[int] = deque()


@pytest.mark.parametrize(
    "derive",
    [
        lambda a: a,
        lambda a: a[10:20],
        lambda a: a.reshape(10, 100).T[3],
        lambda a: memoryview(a)[7:],
        lambda a: torch.from_numpy(a),
        lambda a: torch.from_numpy(a)[5:].view(torch.uint8),
        lambda a: torch.from_numpy(a).detach().numpy(),
        lambda a: torch.from_numpy(a).untyped_storage(),
        lambda a: torch.utils.dlpack.to_dlpack(torch.from_numpy(a)),
        lambda a: torch.from_numpy(a).split(100)[3],
        lambda a: np.broadcast_to(a, (3, 1000)),
    ],
)
def test_whatever_is_made_of_an_array_holds_its_record(derive: object) -> None:
    source = Source()
    record = source.reader.open(source.descriptor)
    record.on_release(source.released.append)
    derived = derive(record.arrays[0])  # type: ignore[operator]
    assert record.is_held()
    record.close()
    source.segment.close()
    assert not source.released
    del derived
    gc.collect()
    assert list(source.released) == [5]


def test_a_record_that_is_dropped_unclosed_is_released() -> None:
    source = Source()
    source.reader.open(source.descriptor).on_release(source.released.append)
    assert list(source.released) == [5]


def test_a_reader_that_goes_first_does_not_lose_the_release() -> None:
    source = Source()
    record = source.reader.open(source.descriptor)
    record.on_release(source.released.append)
    view = record.arrays[0]
    record.close()
    del source.reader, record
    gc.collect()
    assert not source.released
    assert view[999] == 999
    del view
    assert list(source.released) == [5]


def test_a_view_dropped_in_another_thread_is_released_once() -> None:
    source = Source()
    record = source.reader.open(source.descriptor)
    record.on_release(source.released.append)
    views = [record.arrays[0][index:] for index in range(8)]
    record.close()
    threads = [threading.Thread(target=views.pop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(source.released) == [5]


def test_a_closed_record_shows_nothing() -> None:
    source = Source()
    record = source.reader.open(source.descriptor)
    record.close()
    record.close()
    assert not record.is_held()
    for use in (lambda: record.arrays, record.clone, lambda: record.on_release(print)):
        with pytest.raises(LeaseError, match="closed"):
            use()


def test_only_what_is_held_counts_as_held() -> None:
    source = Source()
    record = source.reader.open(source.descriptor)
    for _ in range(3):
        assert not record.is_held()
        arrays = record.arrays
        assert record.is_held()
        del arrays
        (array,) = record.arrays
        assert record.is_held()
        del array


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code behind a ring with one record, in a fresh interpreter."""
    prologue = """
        import os, sys
        from shm import Field, RingReader, RingWriter
        from shm.ring.segment import Segment
        segment = Segment.create(1 << 16)
        writer = RingWriter(segment, run=1, schema=2, incarnation=1, head=0, tail=0, sequence=5)
        descriptor = writer.claim(b"", [Field("<i4", (1000,))]).commit()
        record = RingReader(segment, run=1, schema=2).open(descriptor)
        released = []
        record.on_release(released.append)
        view = record.arrays[0][5:]
    """
    return subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(prologue) + textwrap.dedent(code)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_forked_child_reports_no_release_and_claims_nothing() -> None:
    result = run(
        """
        from shm.errors import ShmError
        child = os.fork()
        if child == 0:
            total = int(view.sum())
            del view
            record.close()
            try:
                writer.claim(b"", [])
            except ShmError as error:
                print(total, released, "forked child" in str(error), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(released)
        del view
        record.close()
        writer.claim(b"", []).abort()
        print(released)
        """
    )
    assert (result.stdout.splitlines(), result.stderr) == (["0 [] True", "[]", "[5]"], "")


def test_leaving_the_interpreter_with_live_views_is_silent() -> None:
    result = run("claim = writer.claim(b'', [])")
    assert (result.returncode, result.stderr) == (0, "")
