"""Head-room is the least of the machine's and every cgroup's, however they are mounted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shm.ring.headroom import available_bytes

_ROOT = Path(__file__).parents[2]
_MIB = 1 << 20


def lay_out(root: Path, files: dict[str, str]) -> Path:
    """A file tree as the kernel would show it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


_MACHINE = {"proc/meminfo": "MemTotal:       9999 kB\nMemAvailable:   1048576 kB\nSwapFree: 0 kB\n"}
_V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
_V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def test_without_cgroups_the_machine_limits(tmp_path: Path) -> None:
    found = available_bytes(lay_out(tmp_path, _MACHINE))
    assert found.available_bytes == 1024 * _MIB
    assert "MemAvailable" in found.limiter


def test_the_tightest_level_of_a_v2_tree_limits_and_caches_count_as_free(tmp_path: Path) -> None:
    found = available_bytes(
        lay_out(
            tmp_path,
            _MACHINE
            | {
                "proc/self/cgroup": "0::/pod/box\n",
                "proc/self/mountinfo": _V2_MOUNT,
                "sys/fs/cgroup/pod/box/memory.max": "max\n",
                "sys/fs/cgroup/pod/box/memory.current": str(50 * _MIB),
                "sys/fs/cgroup/pod/memory.max": str(200 * _MIB),
                "sys/fs/cgroup/pod/memory.high": str(150 * _MIB),
                "sys/fs/cgroup/pod/memory.current": str(100 * _MIB),
                "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {10 * _MIB}\n",
            },
        )
    )
    assert found.available_bytes == 60 * _MIB
    assert found.limiter.count("/pod ") == 1


def test_a_v1_tree_limits(tmp_path: Path) -> None:
    found = available_bytes(
        lay_out(
            tmp_path,
            _MACHINE
            | {
                "proc/self/cgroup": "5:cpu:/x\n4:memory:/a/b\n0::/\n",
                "proc/self/mountinfo": _V1_MOUNT,
                "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": str(64 * _MIB),
                "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": str(60 * _MIB),
                "sys/fs/cgroup/memory/a/b/memory.stat": f"inactive_file 1\ntotal_inactive_file {_MIB}\n",
            },
        )
    )
    assert found.available_bytes == 5 * _MIB


@pytest.mark.parametrize("mount_root", ["/docker/abc", "/"])
def test_a_container_that_sees_only_its_own_sub_tree_is_limited(tmp_path: Path, mount_root: str) -> None:
    found = available_bytes(
        lay_out(
            tmp_path,
            _MACHINE
            | {
                "proc/self/cgroup": "0::/docker/abc\n",
                "proc/self/mountinfo": f"30 23 0:26 {mount_root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
                "sys/fs/cgroup/memory.max": str(32 * _MIB),
                "sys/fs/cgroup/memory.current": str(2 * _MIB),
            },
        )
    )
    assert found.available_bytes == 30 * _MIB


def test_this_machine_has_room() -> None:
    assert available_bytes().available_bytes > 0


def _own_v1_cgroup() -> Path | None:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line.split(":")[2] for line in lines if "memory" in line.split(":")[1].split(",")), None)
    return None if path is None else Path("/sys/fs/cgroup/memory") / path.lstrip("/")


@pytest.fixture
def small_cgroup() -> Path:
    own = _own_v1_cgroup()
    if own is None or not os.access(own, os.W_OK):
        pytest.skip("memory cgroups (v1) cannot be made here")
    small = own / f"fa_rollout-test-{os.getpid()}"
    try:
        small.mkdir()
        (small / "memory.limit_in_bytes").write_text(str(128 * _MIB))
    except OSError as error:
        pytest.skip(f"memory cgroups (v1) cannot be made here: {error}")
    yield small
    small.rmdir()


def test_a_real_cgroup_refuses_instead_of_killing(small_cgroup: Path) -> None:
    code = f"""
import os
open("{small_cgroup}/cgroup.procs", "w").write(str(os.getpid()))
from shm.errors import HeadroomError
from shm.ring.segment import Segment
Segment.create(16 << 20).close()
try:
    Segment.create(256 << 20)
except HeadroomError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert str(small_cgroup) in result.stdout
