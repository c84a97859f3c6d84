"""`python -m fa_rollout.engines.embedded --model DIR`: serve until SIGTERM, or until the parent is gone.

Invariant: the parent is watched before torch is imported, which takes seconds: a launcher that is killed
leaves no engine behind, however early.
"""

import argparse
import os
import signal
import sys
import threading
import time

from fa_rollout.process import streams
from shm.liveness import ParentWatch, wait_ended

_LOOK_S = 0.5
"""Where pidfds are refused."""
_LONG_S = 3600.0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fa_rollout.engines.embedded", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="folder with config.json, safetensors and, for text, tokenizer.json")
    add("--host", default="127.0.0.1", help="address to bind; IPv6 works")
    add("--port", type=int, default=0, help="0: any free one, told on stdout")
    add("--threads", type=int, default=1, help="CPU threads of the model")
    add("--max-running-requests", type=int, default=256)
    add("--max-queued-requests", type=int, default=None)
    add("--max-prefill-tokens", type=int, default=8192, help="padded tokens of one prefill pass")
    add("--kv-cache-mib", type=int, default=1024, help="budget of the KV cache")
    add("--context-length", type=int, default=None, help="shorter than the model's own")
    add("--weight-version", default="default", help="label of the weights at the start")
    add(
        "--ready-fd", type=int, default=None, help="file descriptor that gets the address line, and is closed"
    )
    add("--parent-pid", type=int, default=None, help="exit when this process is gone; ignore SIGINT")
    add("--open-health", action="store_true", help="answer /health without the key: routers ask so")
    add("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    return parser.parse_args(arguments)


def watch_parent(pid: int) -> None:
    """End this process with its parent, by the SIGTERM that also ends it otherwise; ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch = ParentWatch(pid)

    def wait() -> None:
        while not watch.has_ended():
            if watch.pidfd is None:
                time.sleep(_LOOK_S)
            else:
                wait_ended(watch.pidfd, _LONG_S)
        os.kill(os.getpid(), signal.SIGTERM)

    # A thread: the loop cannot watch while the model loads.
    threading.Thread(target=wait, name="parent", daemon=True).start()


def main(arguments: list[str] | None = None) -> int:
    """Watch the parent, then load all that is needed, and serve."""
    options = parse_arguments(arguments)
    if arguments is None:
        streams.secure()
    if options.parent_pid is not None:
        watch_parent(options.parent_pid)
    from fa_rollout.engines.embedded.server import run

    return run(options)


if __name__ == "__main__":
    sys.exit(main())
