"""Segments: reserved, sealed, private, and gone with their last user; whatever fails, nothing is left."""

import errno
import fcntl
import mmap
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shm.errors import HeadroomError, SegmentError
from shm.ring import segment as segment_module
from shm.ring.headroom import available_bytes
from shm.ring.segment import Segment

_ROOT = Path(__file__).parents[2]
_SIZE = 1 << 20


def run(code: str, *, wrapper: tuple[str, ...] = (), **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python code in a fresh interpreter."""
    return subprocess.run(
        [*wrapper, sys.executable, "-c", textwrap.dedent(code)],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def needs(*command: str) -> pytest.MarkDecorator:
    """Skip where a command is not permitted."""
    try:
        works = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        works = False
    return pytest.mark.skipif(not works, reason=f"{' '.join(command)} is not permitted here")


def test_a_segment_is_sealed_private_reserved_and_zero() -> None:
    umask = os.umask(0)
    try:
        with Segment.create(_SIZE + 5) as segment:
            found = os.fstat(segment.fd)
            assert stat.S_IMODE(found.st_mode) == 0o400
            assert found.st_size == segment.size_bytes == segment.array.size == _SIZE + 5
            assert found.st_blocks * 512 >= _SIZE
            assert not os.get_inheritable(segment.fd)
            assert not segment.array.any()
            for size in (1, 1 << 30):
                with pytest.raises(PermissionError):
                    os.ftruncate(segment.fd, size)
            with pytest.raises(PermissionError):
                fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            assert not [name for name in os.listdir("/dev/shm") if "fa_rollout" in name]
    finally:
        os.umask(umask)


def test_attached_segments_show_the_same_bytes() -> None:
    with Segment.create(_SIZE) as segment:
        reader = Segment.attach(os.dup(segment.fd), writable=False)
        writer = Segment.attach(os.dup(segment.fd), writable=True, prefault=False)
        writer.array[77] = 5
        assert segment.array[77] == reader.array[77] == 5
        with pytest.raises(ValueError, match="read-only"):
            reader.array[77] = 6
        reader.close()
        writer.close()


def test_prefaulted_pages_are_mapped_at_once() -> None:
    def resident(segment: Segment) -> int:
        lines = Path("/proc/self/smaps").read_text().splitlines()
        start = f"{segment.address:x}-"
        index = next(i for i, line in enumerate(lines) if line.startswith(start))
        return next(int(line.split()[1]) * 1024 for line in lines[index:] if line.startswith("Rss:"))

    with Segment.create(_SIZE) as segment:
        assert resident(segment) == _SIZE
        for writable in (False, True):
            attached = Segment.attach(os.dup(segment.fd), writable=writable)
            assert resident(attached) == _SIZE
            attached.close()


def test_an_old_kernel_without_populate_or_noexec_is_served_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_module, "_MADV_POPULATE_WRITE", 9999)
    monkeypatch.setattr(segment_module, "_MFD_NOEXEC_SEAL", 1 << 20)
    with Segment.create(_SIZE) as segment:
        assert not segment.array.any()


def test_views_outlive_close_in_every_form() -> None:
    result = run(
        """
        import os, torch, numpy as np
        from shm.ring.segment import Segment
        segment = Segment.create(1 << 20)
        segment.array[:] = 3
        attached = Segment.attach(os.dup(segment.fd), writable=True)
        views = [attached.array[5:], torch.from_numpy(attached.array)[7:].view(torch.uint8).detach()]
        views.append(memoryview(attached.array)[100:])
        attached.close()
        attached.close()
        segment.close()
        del attached, segment
        print(int(views[0].sum()), int(views[1].sum()), views[2][0])
        """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(3 * ((1 << 20) - 5)), str(3 * ((1 << 20) - 7)), "3"]


def test_a_forbidden_write_through_a_tensor_names_its_line() -> None:
    result = run(
        """
        import faulthandler, os, warnings
        import torch
        from shm.ring.segment import Segment
        faulthandler.enable()
        warnings.simplefilter("ignore")
        attached = Segment.attach(os.dup(Segment.create(1 << 20).fd), writable=False)
        torch.from_numpy(attached.array)[:8].add_(1)
        """
    )
    assert result.returncode == -signal.SIGSEGV
    assert 'File "<string>", line 8' in result.stderr


def test_memory_is_free_when_the_last_holder_is_killed() -> None:
    size = 64 << 20
    before = _shared_bytes()
    code = f"""
        import os, signal, sys
        from shm.ring.segment import Segment
        segment = Segment.create({size})
        sys.stdout.write("made")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run(code).stdout == "made"
    assert _shared_bytes() < before + size // 2


def _shared_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))


def test_more_than_the_machine_has_is_refused_before_it_is_touched() -> None:
    with pytest.raises(HeadroomError, match=r"needs .* available by .*ring\.bytes"):
        Segment.create(available_bytes().available_bytes + (1 << 30))


def test_only_sealed_memory_is_attached() -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    empty = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    for fd in (unsealed, empty, os.open("/dev/null", os.O_RDWR), os.open(__file__, os.O_RDONLY), 9999):
        with pytest.raises(SegmentError, match="descriptor"):
            Segment.attach(fd, writable=False)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


_CREATE_CALLS = ["memfd_create", "fchmod", "ftruncate", "posix_fallocate", "fcntl", "mmap"]
_ATTACH_CALLS = ["fstat", "fcntl", "mmap"]
_HOMES = {"fcntl": fcntl, "mmap": mmap}


def _failing(name: str, code: int) -> tuple[Any, str, Callable[..., Any]]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return _HOMES.get(name, os), name, fail


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.EPERM, errno.ENOSYS, errno.EINTR])
@pytest.mark.parametrize("call", _CREATE_CALLS)
def test_when_a_call_of_create_fails_nothing_is_left(
    call: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(*_failing(call, code))
    with pytest.raises((SegmentError, HeadroomError), match=r"; \w+"):
        Segment.create(_SIZE)
    monkeypatch.undo()
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.EPERM])
@pytest.mark.parametrize("call", _ATTACH_CALLS)
def test_when_a_call_of_attach_fails_nothing_is_left(
    call: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Segment.create(_SIZE) as segment:
        before = os.listdir("/proc/self/fd")
        fd = os.dup(segment.fd)
        monkeypatch.setattr(*_failing(call, code))
        with pytest.raises(SegmentError, match="attached"):
            Segment.attach(fd, writable=False)
        monkeypatch.undo()
        assert os.listdir("/proc/self/fd") == before


def test_real_limits_of_files_and_of_address_space_are_explained() -> None:
    result = run(
        """
        import resource
        from shm.errors import SegmentError
        from shm.ring.segment import Segment
        for limit, amount in ((resource.RLIMIT_NOFILE, 3), (resource.RLIMIT_AS, 1 << 28)):
            soft, hard = resource.getrlimit(limit)
            resource.setrlimit(limit, (amount, hard))
            try:
                Segment.create(1 << 29)
            except SegmentError as error:
                print(error)
            resource.setrlimit(limit, (soft, hard))
        Segment.create(1 << 20).close()
        """
    )
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert "ulimit -n" in first
    assert "ring.bytes" in second


@needs("unshare", "-m", "true")
def test_a_container_with_a_small_dev_shm_is_no_hindrance() -> None:
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    code = """
        import os
        from shm.ring.segment import Segment
        assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
        with Segment.create(128 << 20) as segment:
            segment.array[:] = 1
            print(int(segment.array[::4096].sum()))
    """
    result = run(code, wrapper=("unshare", "-m", "sh", "-c", mount, "sh"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str((128 << 20) // 4096)


def test_the_arrays_of_a_segment_begin_at_a_page() -> None:
    with Segment.create(_SIZE) as segment:
        assert segment.address % mmap.PAGESIZE == 0
        assert segment.array.dtype == np.uint8
