"""The machine: memory, open files, proxies, clock, disk space, programs, packages."""

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import fa_rollout
from fa_rollout.config import Config
from fa_rollout.doctor.outcome import CheckOutcome, judged, ok, skipped, warning
from fa_rollout.launcher.rundir import run_base
from fa_rollout.preflight import (
    check_command,
    check_descriptors,
    check_lengths,
    check_memory,
    check_output,
    check_proxies,
    num_requests,
)
from fa_rollout.version import __version__
from shm.ring.headroom import available_bytes

_SMALL_SHM_BYTES = 1 << 30
_LOG_ROOM_BYTES = 1 << 30
_DAY_S = 86400.0
_PACKAGES = (
    *("numpy", "torch", "msgspec", "aiohttp", "tokenizers", "safetensors", "pysimdjson"),
    *("transformers", "pyarrow", "sglang", "slime", "ray"),
)


def memory(config: Config) -> list[CheckOutcome]:
    """Memory for the ring, in the machine and in every cgroup."""
    headroom = available_bytes()
    text = (
        f"the ring needs {size(config.ring.bytes)} of {size(headroom.available_bytes)} ({headroom.limiter})"
    )
    return judged("memory", check_memory(config.ring.bytes, headroom), text)


def lengths(config: Config) -> list[CheckOutcome]:
    """Whether the longest samples fit a micro-batch and the ring."""
    return judged("room", check_lengths(config), "the longest samples fit a micro-batch and the ring")


def shared_memory(folder: Path = Path("/dev/shm")) -> list[CheckOutcome]:
    """The ring does not use it; torch's data loaders and NCCL do."""
    try:
        room = os.statvfs(folder)
    except OSError:
        text = f"{folder} does not exist; the ring does not use it, but torch's data loaders and NCCL do"
        return [warning("shm", text, "mount a tmpfs there")]
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    text = f"{folder} has {size(free)} free of {size(total)} (not used by the ring)"
    if free < _SMALL_SHM_BYTES:
        fix = "docker run --shm-size=8g, if the trainer uses data loader workers or NCCL on several GPUs"
        return [warning("shm", text, fix)]
    return [ok("shm", text)]


def descriptors(config: Config) -> list[CheckOutcome]:
    """Open files."""
    needed, limit = num_requests(config), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    text = f"{limit:,} open files allowed, enough for {needed:,} concurrent samples"
    return judged("descriptors", check_descriptors(needed, limit), text)


def proxies(urls: Sequence[str], environment: Mapping[str, str]) -> list[CheckOutcome]:
    """Proxies that requests to engines bypass."""
    findings = check_proxies(urls, environment)
    return judged("proxies", findings, "no proxy is set for the engines")


def clock() -> list[CheckOutcome]:
    """A clock that is far behind breaks logs and certificates."""
    newest_s = max(path.stat().st_mtime for path in Path(fa_rollout.__file__).parent.glob("*.py"))
    now_s = time.time()
    text = f"it is {time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(now_s))}"
    if now_s < newest_s - _DAY_S:
        return [warning("clock", f"{text}, but files of this package are newer", "set the clock (NTP)")]
    return [ok("clock", text)]


def output(config: Config) -> list[CheckOutcome]:
    """The folder for the run's records."""
    folder = config.run.output_dir
    if folder is None:
        return [skipped("output", "run.output_dir is not set: no records for report, samples and replay")]
    if findings := check_output(folder):
        return judged("output", findings, "")
    return [_room("output", "run.output_dir", Path(folder), _LOG_ROOM_BYTES)]


def weights(config: Config, model: Path | None) -> list[CheckOutcome]:
    """Disk space for two versions of the weight files."""
    if config.trainer.publish != "disk":
        return []
    folder = config.trainer.weights_dir
    what = "the folder of weight files (trainer.weights_dir)"
    num_bytes = 0 if model is None else sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return [_room("weights", what, run_base() if folder is None else Path(folder), 2 * num_bytes)]


def programs(command: Sequence[str]) -> list[CheckOutcome]:
    """The trainer's program, and torchrun."""
    if command:
        return judged("command", check_command(command), f"{shutil.which(command[0])}")
    torchrun = shutil.which("torchrun") or shutil.which("torchrun", path=str(Path(sys.executable).parent))
    if torchrun is None:
        text = "no trainer command was given, and torchrun is not on PATH"
        return [warning("command", text, "activate the trainer's environment, or add its command after --")]
    return [ok("command", f"no trainer command given; torchrun is {torchrun}")]


def packages() -> list[CheckOutcome]:
    """Versions of the main packages, for bug reports."""
    found = [f"python {platform.python_version()}", f"fa-rollout {__version__}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    where = f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} CPUs"
    return [ok("packages", where, [", ".join(found)])]


def _room(check: str, what: str, folder: Path, wanted: int) -> CheckOutcome:
    """Free space in a folder, or where it will be created."""
    above = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(above).free
    text = f"{what} = {folder}: {size(free)} free"
    if free < wanted:
        return warning(
            check, f"{text}, but {size(wanted)} are needed", "free some space, or choose another folder"
        )
    return ok(check, text)


def size(num_bytes: float) -> str:
    """A size with its unit, such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
