"""A generator of another package, in place of `fa_rollout.generator`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """What the hub runs; the launcher feeds its prompts."""

    module: str
    """Run as `python -m module`."""
    payload: bytes
    """Given to every life of it, over inherited descriptors alone."""
