"""Engines that come and go while a run goes on: asked by people and the launcher, done by the generator."""

from trainer_hook.messages.base import Message
from trainer_hook.messages.from_generator import EngineFigures


class ChangeEngines(Message):
    """An engine joins, or leaves. An observer's is answered by `EnginesNow` or `Refused`; the
    launcher's is not answered; the hub's to the generator by `EnginesChanged`."""

    request: int
    url: str
    joins: bool
    """It gets requests as soon as it holds the current weights. False: it gets no more."""
    drain_s: float = 0.0
    """Longest wait for the requests that an engine which leaves still has; then they go on elsewhere."""


class EnginesNow(Message):
    """Answer to `ChangeEngines`: all that are asked now."""

    request: int
    engines: list[str]
    concurrency: int
    """Samples that they take at once."""


class EnginesDown(Message):
    """The launcher's: of the engines that it starts all that do not listen now; again when that changes."""

    urls: list[str]


class EnginesChanged(Message):
    """The generator's answer."""

    request: int
    url: str
    error: str | None
    """Why nothing was changed."""
    engines: list[str]
    """All that are asked now."""
    concurrency: int
    """Samples that they take at once."""
    figures: list[EngineFigures] = []
    """Of each, as in a `Pulse`: who hears of the change and looks finds it."""
