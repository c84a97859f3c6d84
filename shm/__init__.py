"""Bytes between processes: segment, ring of variable-length records, control channel. Independent of RL.

The names below import their modules on first use, so a process imports only what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shm.channels.channel import Channel
    from shm.channels.channel_loop import LoopChannel
    from shm.channels.endpoint import Listener, connect, listen
    from shm.ring.layout import Field
    from shm.ring.reader import Record, RingReader
    from shm.ring.segment import Segment
    from shm.ring.table import RingTable
    from shm.ring.words import Descriptor
    from shm.ring.writer import Claim, RingWriter

_HOMES = {
    "Channel": "shm.channels.channel",
    "Claim": "shm.ring.writer",
    "Descriptor": "shm.ring.words",
    "Field": "shm.ring.layout",
    "Listener": "shm.channels.endpoint",
    "LoopChannel": "shm.channels.channel_loop",
    "Record": "shm.ring.reader",
    "RingReader": "shm.ring.reader",
    "RingTable": "shm.ring.table",
    "RingWriter": "shm.ring.writer",
    "Segment": "shm.ring.segment",
    "connect": "shm.channels.endpoint",
    "listen": "shm.channels.endpoint",
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
