"""What the hub says to its launcher."""

from trainer_hook.messages.base import Message
from trainer_hook.messages.from_generator import Settlement


class HubReady(Message):
    """The hub listens: what a trainer needs in its environment."""

    address: str
    run: str
    pid: int


class RunOpened(Message):
    """The generator has read the data and reached the engines: a trainer may start."""


class Wanted(Message):
    """Prompts that the run can use by now, counted from its start; it only grows."""

    num_groups: int


class Enclosed(Message):
    """What the generator sent along with the record of a group that now waits for the trainer."""

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
    """Last message of the hub: how the run ended and its books."""

    exit_code: int
    text: str
    counts: dict[str, int]
