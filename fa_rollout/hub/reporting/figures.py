"""What the hub tells of itself. Reads the state, changes nothing."""

from dataclasses import asdict

import msgspec

from fa_rollout.hub.core import Core
from trainer_hook.messages import HubStatistics, RingStatistics


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


def statistics(core: Core) -> HubStatistics:
    """For `hook.statistics()`."""
    flow, ring = core.flow, core.table.statistics()
    return HubStatistics(
        counts=asdict(flow.books.counts()) if flow else {},
        step=flow.step if flow else 0,
        version=flow.version if flow else 0,
        lineage=core.lineage,
        update=core.updates.phase,
        waits_for=core.waits_for(),
        ring=RingStatistics(
            bytes=ring.size_bytes,
            span_bytes=ring.span_bytes,
            live_bytes=ring.live_bytes,
            num_records=ring.num_live,
            oldest_lease_s=ring.oldest_lease_s,
        ),
        refused_records=flow.meter.num_refused if flow else 0,
        mean_record_bytes=flow.meter.mean_record_bytes if flow else 0.0,
        trained_tokens=flow.meter.trained_tokens if flow else 0,
        dropped_tokens=flow.meter.dropped_tokens if flow else 0.0,
        generator=_generator(core),
    )


def _generator(core: Core) -> dict[str, float]:
    pulse = core.pulses.last
    if pulse is None:
        return {}
    figures = msgspec.structs.asdict(pulse)
    return {name: float(value) for name, value in figures.items() if name not in ("engines", "slowest")}
