"""The word that writer, table and readers share: the descriptor of one record."""

from typing import NamedTuple


class Descriptor(NamedTuple):
    """Which record, and where; what is sent in place of its bytes."""

    incarnation: int
    """Life of the writer that committed it."""
    sequence: int
    """Number of the commit, rising over all lives."""
    position: int
    """Of its first byte in the ring's endless stream; the offset is the remainder by the ring's size."""
    length: int
