"""What every control message is, and what goes both ways."""

import msgspec

PROTOCOL = 5
"""Raised with every incompatible change of a message or of the record schema."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Root of all control messages."""


class Ping(Message):
    """Liveness; answered by `Pong` with the same number."""

    number: int


class Pong(Message):
    number: int


class Stop(Message):
    """End: take no new work, drain within the grace, exit."""

    grace_s: float
    reason: str
