"""Errors of the embedded engine."""

from typing import Any

from shm.errors import FaRolloutError


class EngineError(FaRolloutError):
    """Root of the errors of the embedded engine."""


class EngineStartError(EngineError, RuntimeError):
    """An engine process that did not come up; the text carries its last lines."""


class UnsupportedModel(EngineError, ValueError):
    """A model that this engine cannot run exactly."""


class WeightsRefused(EngineError, ValueError):
    """New weights that do not fit the model; nothing was changed."""


class EngineStopped(EngineError, RuntimeError):
    """The engine's thread has ended, in order or by an error of its own."""


class RefusedRequest(EngineError, ValueError):
    """A request answered with an HTTP error; `body` is what SGLang would say."""

    def __init__(self, text: str, *, status: int = 400, body: Any = None) -> None:
        super().__init__(text)
        self.status = status
        self.body = {"error": {"message": text}} if body is None else body

    def __reduce__(self) -> tuple[Any, ...]:
        return _refused, (str(self), self.status, self.body)


def _refused(text: str, status: int, body: Any) -> RefusedRequest:
    return RefusedRequest(text, status=status, body=body)
