"""The command line of an embedded engine."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def engine_command(
    model_dir: str | Path, *, port: int, threads: int, ready_fd: int, options: Sequence[str] = ()
) -> list[str]:
    """Of a server that ends with this process and writes its address to `ready_fd`."""
    return [
        *(sys.executable, "-m", "fa_rollout.engines.embedded", "--model", str(model_dir)),
        *("--port", str(port), "--threads", str(threads)),
        *("--ready-fd", str(ready_fd), "--parent-pid", str(os.getpid())),
        *options,
    ]
