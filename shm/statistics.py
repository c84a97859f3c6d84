"""Figures that stateful objects of this package tell of themselves; metrics only read these."""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterStatistics:
    """Figures of a `RingWriter`; bytes are of the ring."""

    size_bytes: int
    head: int
    tail: int
    lowest_open: int
    num_open: int
    num_committed: int
    num_aborted: int
    num_full: int
    """Claims that found no room."""
    committed_bytes: int
    padding_bytes: int
    """Lost before the ring's end so far, since records never wrap."""
    claimable_bytes: int
    watermark_bytes: int
    """Largest span from tail to head so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStatistics:
    """Figures of a `RingTable`; bytes are of the ring."""

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
    """Figures of a `RingReader`."""

    num_opened: int
    num_refused: int
    opened_bytes: int
    num_watched: int
    """Records of this process whose release is still to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStatistics:
    """Figures of a `Channel`."""

    num_sent: int
    num_received: int
    sent_bytes: int
    received_bytes: int
    num_queued: int
    queued_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """The record that holds the tail back."""

    sequence: int
    holders: tuple[Hashable, ...]
    """Who leases it; empty: committed and not handed over, or handed over and not retired."""
    age_s: float
    """Since its oldest lease began, or since it was admitted when nobody leases it."""
    length: int
    stuck_bytes: int
    """Free bytes behind it, which the writer cannot claim because of it."""
