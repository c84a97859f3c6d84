"""What a launcher that feeds the prompts itself says to the hub."""

from trainer_hook.messages.base import Message


class Feed(Message):
    """Prompts of further groups, in order: the n-th payload of a run is group n. Opaque to the hub."""

    payloads: list[bytes]


class Announce(Message):
    """The launcher begins a step; somebody else gives the engines their weights.

    Passed on to the generator.
    """

    step: int
    """By the launcher's own count."""
    version: int
    """That trains the step's batch, by the hub's count: what a publication would have told."""
    held: int
    """That engines hold now, by their labels."""
