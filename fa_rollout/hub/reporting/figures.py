"""What the hub tells of itself. Reads the state, changes nothing."""

from typing import Any

import msgspec

from fa_rollout.hub.core import Core
from fa_rollout.hub.flow.books import Counts


def counts(core: Core) -> dict[str, int]:
    """The books for people: what was taken, and where all of it is."""
    if core.flow is None:
        return dict.fromkeys(("taken", "trained", "filtered", "failed", "dropped", "returned"), 0)
    now = core.flow.books.counts()
    return {
        "taken": now.taken,
        "trained": now.trained,
        "filtered": now.filtered,
        "failed": now.failed,
        "dropped": now.dropped,
        "returned": now.queued + now.live + now.handed,
    }


def statistics(core: Core) -> dict[str, Any]:
    """A snapshot for `hook.statistics()` and observers."""
    flow = core.flow
    now = flow.books.counts() if flow else None
    return {
        "counts": {name: getattr(now, name) for name in Counts.__slots__} if now else {},
        "step": flow.step if flow else 0,
        "version": flow.version if flow else 0,
        "lineage": core.lineage,
        "update": str(core.updates.phase),
        "waits_for": core.waits_for(),
        "ring": _ring(core),
        "refused_records": flow.meter.num_refused if flow else 0,
        "mean_record_bytes": flow.meter.mean_record_bytes if flow else 0.0,
        "trained_tokens": flow.meter.trained_tokens if flow else 0,
        "dropped_tokens": flow.meter.dropped_tokens if flow else 0.0,
        "generator": _generator(core),
    }


def _ring(core: Core) -> dict[str, float]:
    """Bytes of the ring: its size, the span from tail to head, and what records hold."""
    used = core.table.statistics()
    return {
        "bytes": used.size_bytes,
        "span_bytes": used.span_bytes,
        "live_bytes": used.live_bytes,
        "num_records": used.num_live,
        "oldest_lease_s": used.oldest_lease_s,
    }


def _generator(core: Core) -> dict[str, float]:
    pulse = core.pulse
    if pulse is None:
        return {}
    figures = msgspec.structs.asdict(pulse)
    return {name: value for name, value in figures.items() if name not in ("engines", "slowest")}
