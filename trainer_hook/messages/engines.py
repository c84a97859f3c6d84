"""Adding and removing engines during a run: requested by users and the launcher, done by the generator."""

from trainer_hook.messages.base import Message
from trainer_hook.messages.from_generator import EngineFigures


class ChangeEngines(Message):
    """Add or remove an engine. From an observer: answered by `EnginesNow` or `Refused`. From the launcher:
    not answered. From the hub to the generator: answered by `EnginesChanged`."""

    request: int
    url: str
    joins: bool
    """True: add it, and send requests once it has the current weights. False: remove it."""
    drain_s: float = 0.0
    """Longest wait for running requests of a leaving engine; then they move to other engines."""


class EnginesNow(Message):
    """Answer to `ChangeEngines`: the engines in use."""

    request: int
    engines: list[str]
    concurrency: int
    """Samples that they take at once."""


class EnginesDown(Message):
    """From the launcher: its engines that are not listening now; sent at every change."""

    urls: list[str]


class EnginesChanged(Message):
    """The generator's answer."""

    request: int
    url: str
    error: str | None
    """Reason if nothing was changed."""
    engines: list[str]
    """The engines in use."""
    concurrency: int
    """Samples that they take at once."""
    figures: list[EngineFigures] = []
    """Per engine, as in a `Pulse`, so that the next snapshot already shows the change."""
