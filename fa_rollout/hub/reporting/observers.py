"""Who looks at a run and takes no part in it: `top`, the metrics exporter.

In: their questions. Out: snapshots. Invariant: an observer never holds the hub up: there are few of them, a
snapshot is made once for all who ask at a time, and one that asks on without reading is dropped.
"""

import time

import msgspec

from fa_rollout.account.snapshot import Snapshot
from fa_rollout.hub.core import Core
from fa_rollout.hub.io.selector import Selector
from fa_rollout.hub.reporting.snapshots import take_snapshot, with_history
from shm.channels.channel import Channel
from trainer_hook import messages as m

MAX_OBSERVERS = 32
MAX_UNREAD_BYTES = 1 << 20
SNAPSHOT_AGE_S = 0.2
"""Who asks more often gets the same again."""


class Observers:
    """The observers of one run."""

    def __init__(self, core: Core, selector: Selector) -> None:
        self._core = core
        self._selector = selector
        self._channels: dict[Channel, tuple[int, int]] = {}
        """Each with the numbers of steps and updates that it has been told of."""
        self._snapshot: tuple[float, int, Snapshot] | None = None
        """When it was made, and how many steps, updates and changes of engines there were by then."""

    def admit(self, channel: Channel) -> str | None:
        """Take one in; the reason where that cannot be."""
        if len(self._channels) >= MAX_OBSERVERS:
            return f"this run has {MAX_OBSERVERS} observers, and cannot have more: end some of them"
        self._channels[channel] = (0, 0)
        self._selector.send(channel, m.Reply(request=0))
        return None

    def answer(self, channel: Channel, query: m.QuerySnapshot) -> bool:
        """Answer a question; False for an observer that does not read and must be dropped."""
        found = self._snapshot_since(query.steps_seen, query.updates_seen)
        self._channels[channel] = (found.totals.steps, found.totals.updates)
        self._selector.send(channel, _taken(query.request, found))
        return channel.statistics().queued_bytes <= MAX_UNREAD_BYTES

    def left(self, channel: Channel) -> None:
        """One is gone."""
        self._channels.pop(channel, None)

    def farewell(self, ended: m.RunEnded) -> None:
        """Tell all of them how the run ended; what one has not read by now is not waited for."""
        self._snapshot = None
        for channel, seen in self._channels.items():
            self._selector.send(channel, _taken(0, self._snapshot_since(*seen)))
            self._selector.send(channel, ended)
        self._selector.flush()
        for channel in self._channels:
            if channel.wants_write:
                self._selector.unwatch(channel)

    def _snapshot_since(self, steps_seen: int, updates_seen: int) -> Snapshot:
        """Where the run stands, or stood a moment ago, with the steps that came since."""
        now_s, history = time.monotonic(), self._core.history
        num_events = history.num_steps + history.num_updates + self._core.membership.num_changes
        made_s, had, snapshot = self._snapshot or (-SNAPSHOT_AGE_S, 0, None)
        if snapshot is None or now_s - made_s > SNAPSHOT_AGE_S or had != num_events:
            snapshot = take_snapshot(self._core)
            self._snapshot = (now_s, num_events, snapshot)
        return with_history(self._core, snapshot, steps_seen=steps_seen, updates_seen=updates_seen)


def _taken(request: int, snapshot: Snapshot) -> m.SnapshotTaken:
    return m.SnapshotTaken(request=request, snapshot=msgspec.msgpack.encode(snapshot))
