"""The descriptor of a record, shared by writer, table and readers."""

from typing import NamedTuple


class Descriptor(NamedTuple):
    """Identity and location of a record; sent instead of its bytes."""

    incarnation: int
    """Incarnation of the writer that committed it."""
    sequence: int
    """Number of the commit, increasing over all incarnations."""
    position: int
    """Of its first byte in the ring's stream; the offset is the position modulo the ring's size."""
    length: int
