"""The run's figures over time: a snapshot now and then, one JSON object a line, for report and whoever plots.

In: the state of the hub. Out: `metrics.jsonl` beside the event log. Invariant: every step and update of the
run is in exactly one line, as long as no more than `history` keeps fall between two.
"""

import time
from pathlib import Path

import msgspec

from fa_rollout.account.snapshot import Snapshot
from fa_rollout.hub.core import Core
from fa_rollout.hub.io.event_log import EventLog
from fa_rollout.hub.reporting.snapshots import take_snapshot, with_history

NAME = "metrics.jsonl"


class MetricsLine(Snapshot, frozen=True, kw_only=True, tag_field="event", tag="snapshot"):  # type: ignore[misc]
    """A snapshot with the clock of `events.jsonl`."""

    t: float


class MetricsLog:
    """Writes one line an interval, and one at the end."""

    def __init__(self, core: Core, *, folder: Path | None, interval_s: float) -> None:
        self._core = core
        self._log = EventLog(None if folder is None else folder / NAME)
        self._is_kept = folder is not None
        self._interval_s = interval_s
        self._next_s = 0.0
        self._seen = (0, 0)

    def tick(self, now_s: float) -> None:
        """Called a few times a second."""
        if self._is_kept and now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            self._write()

    def close(self) -> None:
        """Write how it ended."""
        if self._is_kept:
            self._write()
        self._log.close()

    def _write(self) -> None:
        steps, updates = self._seen
        snapshot = with_history(self._core, take_snapshot(self._core), steps_seen=steps, updates_seen=updates)
        self._seen = (snapshot.totals.steps, snapshot.totals.updates)
        self._log.write(MetricsLine(t=time.monotonic(), **msgspec.structs.asdict(snapshot)))
        self._log.flush()
        if self._log.failure is not None:
            self._core.warn(self._log.failure)
            self._is_kept = False
