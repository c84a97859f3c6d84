"""Messages to the hub from a launcher that feeds prompts."""

from trainer_hook.messages.base import Message


class Feed(Message):
    """Prompts of further groups, in order: the n-th payload of a run is group n. Opaque to the hub."""

    payloads: list[bytes]


class Announce(Message):
    """The launcher starts a step; the engines' weights are updated elsewhere.

    Forwarded to the generator.
    """

    step: int
    """Counted by the launcher."""
    version: int
    """The version that trains the step's batch, counted by the hub."""
    held: int
    """The engines' current version, by their labels."""
