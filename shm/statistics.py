"""Statistics of the stateful objects of this package; metrics only read these."""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterStatistics:
    """Statistics of a `RingWriter`, in bytes of the ring."""

    size_bytes: int
    head: int
    tail: int
    lowest_open: int
    num_open: int
    num_committed: int
    num_aborted: int
    num_full: int
    """Number of claims without room."""
    committed_bytes: int
    padding_bytes: int
    """Bytes lost at the ring's end so far, because records never wrap."""
    claimable_bytes: int
    watermark_bytes: int
    """Largest span from tail to head so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStatistics:
    """Statistics of a `RingTable`, in bytes of the ring."""

    size_bytes: int
    tail: int
    head: int
    """End of the highest record, or the lowest claim that may be open above it."""
    num_live: int
    """Records that are not free yet."""
    num_leases: int
    live_bytes: int
    span_bytes: int
    """From tail to head: what the writer cannot claim, free or not."""
    watermark_bytes: int
    """Largest span so far."""
    num_admitted: int
    num_refused: int
    num_freed: int
    oldest_lease_s: float
    """Age of the oldest lease; 0 without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderStatistics:
    """Statistics of a `RingReader`."""

    num_opened: int
    num_refused: int
    opened_bytes: int
    num_watched: int
    """Records that this process has not released yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStatistics:
    """Statistics of a `Channel`."""

    num_sent: int
    num_received: int
    sent_bytes: int
    received_bytes: int
    num_queued: int
    queued_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """The record that blocks the tail."""

    sequence: int
    holders: tuple[Hashable, ...]
    """Lease holders; empty: committed and not delivered, or delivered and not retired."""
    age_s: float
    """Since its oldest lease began; without leases, since it was admitted."""
    length: int
    stuck_bytes: int
    """Free bytes behind it, which the writer cannot claim."""
