"""Errors that reach a trainer: in a hook call, never from a background thread."""

from shm.errors import FaRolloutError


class HookError(FaRolloutError):
    """Root of the errors that hook calls raise."""


class EndOfData(HookError, StopIteration):
    """The data or the run has ended: there is no further batch. Not a failure."""


class GeneratorFailed(HookError, RuntimeError):
    """The generator was given up; the text carries its own exception and traceback."""


class HubLost(HookError, ConnectionError):
    """The hub is gone; views stay mapped, the run resumes from the trainer's checkpoint."""


class PeerLost(HookError, ConnectionError):
    """Another rank of the job is gone."""


class Stalled(HookError, TimeoutError):
    """A wait reached its deadline; the text says who waits for whom."""


class HookStateError(HookError, RuntimeError):
    """A hook method called at a time when it cannot work (closed, forked, out of order)."""


class StaleView(HookError, RuntimeError):
    """A view used after its record went back to the ring."""


class UnsplittableBatch(HookError, ValueError):
    """A batch that cannot be split over the ranks; the text names both numbers."""


class WeightUpdateFailed(HookError, RuntimeError):
    """The engines did not take the new weights; they go on with the version that they had."""


class WeightsMismatch(HookError, ValueError):
    """Weights that are not those of the engines' model; nothing was sent, the version stays what it was."""


class EvaluationFailed(HookError, ValueError):
    """An evaluation whose data set or settings cannot be used, or that the run's end cut short."""


class PublishFailed(HookError, OSError):
    """Weights that could not be written for the engines; they keep the version they have."""


class StreamBroken(HookError, ConnectionError):
    """Engines were lost while they took weights; a stream to the others may work."""
