"""Messages from the hub to its launcher."""

from trainer_hook.messages.base import Message
from trainer_hook.messages.from_generator import Settlement


class HubReady(Message):
    """The hub is listening; carries the values for a trainer's environment."""

    address: str
    run: str
    pid: int


class RunOpened(Message):
    """The generator has read the data and reached the engines: a trainer may start."""


class Wanted(Message):
    """Number of prompts that the run can use, counted from its start; never decreases."""

    num_groups: int


class Enclosed(Message):
    """The generator's payload for a group that is now ready for the trainer."""

    group: int
    attempt: int
    payload: bytes


class Departed(Message):
    """A fed group ended without being trained: filtered, failed or dropped."""

    group: int
    outcome: Settlement
    reason: str
    payload: bytes = b""


class RunEnded(Message):
    """Last message of the hub: how the run ended, and its counts."""

    exit_code: int
    text: str
    counts: dict[str, int]
