"""How much memory this process may still take, and who sets the limit.

In: /proc and the cgroup trees, v1 and v2. Out: a `Headroom`. Shared memory beyond it ends in the OOM killer,
which also takes bystanders; so it is asked before memory is reserved, and every limit on the way up to the
root counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shm.errors import HeadroomError

RESERVE_BYTES = 16 << 20
"""Left free beside a segment, for page tables and the processes that use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """Bytes that can still be taken, and what limits them."""

    available_bytes: int
    limiter: str


def available_bytes(root: Path = Path("/")) -> Headroom:
    """The smallest head-room of MemAvailable and all memory cgroups of this process.

    `root` is where `proc` and the cgroup mounts are looked for.
    """
    limits = [_machine(root), *_cgroups(root)]
    return min(limits, key=lambda limit: limit.available_bytes)


def require(size_bytes: int, what: str, way_out: str) -> None:
    """Make sure that `size_bytes` more can be taken.

    Raises:
        HeadroomError: they cannot; the text says who limits and ends with `way_out`.
    """
    headroom = available_bytes()
    if size_bytes + RESERVE_BYTES > headroom.available_bytes:
        raise HeadroomError(
            f"{what} needs {size_bytes:,} bytes and {RESERVE_BYTES:,} beside them, "
            f"{max(0, headroom.available_bytes):,} are available by {headroom.limiter}; {way_out}"
        )


def _machine(root: Path) -> Headroom:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return Headroom(available_bytes=int(line.split()[1]) * 1024, limiter="the machine (MemAvailable)")
    return Headroom(available_bytes=1 << 62, limiter="nothing: the kernel does not tell MemAvailable")


def _cgroups(root: Path) -> Iterator[Headroom]:
    paths = _own_cgroups(root)
    for kind, mount_root, mount_point in _mounts(root):
        own = paths.get(kind)
        if own is None:
            continue
        # Inside a container the mount shows a sub-tree, or the path shown lies outside of it.
        inside = own[len(mount_root) :] if mount_root != "/" and own.startswith(mount_root) else own
        top = root / mount_point.lstrip("/")
        folder = top / inside.strip("/")
        while True:
            limit = _v2(folder) if kind == "v2" else _v1(folder)
            if limit is not None:
                yield limit
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def _own_cgroups(root: Path) -> dict[str, str]:
    paths = {}
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths["v2"] = path
        elif "memory" in controllers.split(","):
            paths["v1"] = path
    return paths


def _mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """(v1 or v2, path inside the hierarchy, mount point) of each mounted memory hierarchy."""
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        front, _, back = line.partition(" - ")
        fields, kind = front.split(), back.split()
        if kind[0] == "cgroup2":
            yield "v2", fields[3], fields[4]
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield "v1", fields[3], fields[4]


def _v2(folder: Path) -> Headroom | None:
    limits = [_number(folder / "memory.max"), _number(folder / "memory.high")]
    return _headroom(folder, limits, _number(folder / "memory.current"), "inactive_file", "memory.max")


def _v1(folder: Path) -> Headroom | None:
    limits = [_number(folder / "memory.limit_in_bytes")]
    used = _number(folder / "memory.usage_in_bytes")
    return _headroom(folder, limits, used, "total_inactive_file", "memory.limit_in_bytes")


def _headroom(
    folder: Path, limits: list[int | None], used: int | None, reclaimable: str, name: str
) -> Headroom | None:
    known = [limit for limit in limits if limit is not None]
    if not known or used is None:
        return None
    free = min(known) - used + _statistic(folder / "memory.stat", reclaimable)
    return Headroom(available_bytes=free, limiter=f"the memory cgroup {folder} ({name} {min(known):,})")


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)
