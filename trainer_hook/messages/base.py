"""Base class of control messages, and messages that go both ways."""

import msgspec

PROTOCOL = 5
"""Increased with every incompatible change of a message or of the record schema."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base class of all control messages."""


class Ping(Message):
    """Liveness; answered by `Pong` with the same number."""

    number: int


class Pong(Message):
    number: int


class Stop(Message):
    """Accept no new work, drain within the grace period, exit."""

    grace_s: float
    reason: str
