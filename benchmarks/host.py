"""The machine that figures were measured on, as every benchmark writes it down."""

import os
import platform
from pathlib import Path
from typing import Any


def host() -> dict[str, Any]:
    """CPU, kernel, Python, and how busy the machine is now."""
    return {
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    """Its model's name; arm64 kernels tell none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )
