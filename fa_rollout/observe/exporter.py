"""The metrics process: `python -m fa_rollout.observe.exporter --config-fd N --parent-pid P`.

In: the configuration by an inherited pipe, the run by its environment. Out: figures in the sinks that
`[metrics]` names. Invariant: whatever happens here, the run does not notice; a sink that fails is told once
and left alone, and the others go on.
"""

import argparse
import json
import logging
import os
import select
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

from fa_rollout.account.snapshot import Snapshot
from fa_rollout.config import from_dict
from fa_rollout.launcher.running import find
from fa_rollout.observe.observer import Observer, RunOver
from fa_rollout.observe.sinks import Sink, open_sinks
from fa_rollout.process import streams
from fa_rollout.process.log_level import configure
from shm.liveness import ParentWatch

logger = logging.getLogger(__name__)


class Exporter:
    """Asks once an interval, and hands on what it hears."""

    def __init__(self, observer: Observer, sinks: list[Sink], *, interval_s: float, parent_pid: int) -> None:
        self._observer = observer
        self._sinks = sinks
        self._interval_s = interval_s
        self._parent = ParentWatch(parent_pid)

    def run(self) -> None:
        """Until the run ends, or its launcher is gone."""
        files = [self._observer.fileno()]
        if self._parent.pidfd is not None:
            files.append(self._parent.pidfd)
        next_s = time.monotonic()
        try:
            while not self._parent.has_ended():
                now_s = time.monotonic()
                if now_s >= next_s:
                    next_s = max(next_s + self._interval_s, now_s)
                    self._observer.ask()
                select.select(files, [], [], max(0.0, min(1.0, next_s - now_s)))
                snapshot = self._observer.take()
                if snapshot is not None:
                    self._write(snapshot)
        except RunOver as over:
            if over.last is not None:
                self._write(over.last)

    def close(self) -> None:
        """Give the sinks the chance to finish."""
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # a library of others', which may raise what it likes
                logger.warning("event=sink_not_closed sink=%s error=%r", type(sink).__name__, error)

    def _write(self, snapshot: Snapshot) -> None:
        for sink in list(self._sinks):
            try:
                sink.write(snapshot)
            except Exception as error:  # as above
                logger.warning("event=sink_left_alone sink=%s", type(sink).__name__, exc_info=error)
                self._sinks.remove(sink)


def main() -> int:
    """Export until the run's end."""
    parser = argparse.ArgumentParser(
        prog="fa_rollout.observe.exporter", description="Started by the launcher."
    )
    parser.add_argument("--config-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    options = parser.parse_args()
    streams.secure()
    configure("metrics")
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(options.config_fd, "rb") as pipe:
        config = from_dict(json.load(pipe))
    running = find()
    with Observer(running) as observer:
        sinks = open_sinks(config, running.run)
        exporter = Exporter(
            observer, sinks, interval_s=config.metrics.interval_s, parent_pid=options.parent_pid
        )
        try:
            exporter.run()
        finally:
            exporter.close()
    return 0


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
