"""Bytes between processes: memfd segment, ring of variable-length records, control channel. No word of RL.

The names below load their modules when they are first used, so that a process imports what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shm.channel import Channel
    from shm.channel_loop import LoopChannel
    from shm.endpoint import Listener, connect, listen
    from shm.layout import Field
    from shm.reader import Record, RingReader
    from shm.segment import Segment
    from shm.table import RingTable
    from shm.words import Descriptor
    from shm.writer import Claim, RingWriter

_HOMES = {
    "Channel": "shm.channel",
    "Claim": "shm.writer",
    "Descriptor": "shm.words",
    "Field": "shm.layout",
    "Listener": "shm.endpoint",
    "LoopChannel": "shm.channel_loop",
    "Record": "shm.reader",
    "RingReader": "shm.reader",
    "RingTable": "shm.table",
    "RingWriter": "shm.writer",
    "Segment": "shm.segment",
    "connect": "shm.endpoint",
    "listen": "shm.endpoint",
}

__all__ = [
    "Channel",
    "Claim",
    "Descriptor",
    "Field",
    "Listener",
    "LoopChannel",
    "Record",
    "RingReader",
    "RingTable",
    "RingWriter",
    "Segment",
    "connect",
    "listen",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'shm' has no attribute {name!r}")
    return getattr(import_module(home), name)
