"""Version labels: what engines call the weights that they hold. Pure.

A label of ours is `<lineage>:<version>`; SGLang's own start has none, or a fixed word.
"""

from collections.abc import Collection

OF_START = (None, "default")
"""What SGLang engines call the weights that they started with."""
IN_PIECES = "in-pieces"
"""Label of an engine whose weights are being replaced piece by piece: no version."""


def lineage_of(label: str) -> str:
    """What stands before the version; empty where there is nothing."""
    return label.rpartition(":")[0]


def is_first(label: str | None, lineages: Collection[str]) -> bool:
    """Whether an engine holds the weights of its own start: it says so, or has our label for version 0."""
    return label in OF_START or label in {f"{lineage}:0" for lineage in lineages}


def is_foreign(label: str, lineages: Collection[str]) -> bool:
    """Whether a label is a version of another trainer: `lineage:number` of another lineage, or a number."""
    origin, _, digits = label.rpartition(":")
    return digits.isdigit() and origin not in lineages
