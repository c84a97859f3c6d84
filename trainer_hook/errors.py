"""Errors that a trainer sees: always raised by a hook call, never by a background thread."""

from shm.errors import FaRolloutError


class HookError(FaRolloutError):
    """Base class of the errors that hook calls raise."""


class EndOfData(HookError, StopIteration):
    """The data or the run has ended: there are no more batches. Not a failure."""


class GeneratorFailed(HookError, RuntimeError):
    """The generator failed for good; the text contains its exception and traceback."""


class HubLost(HookError, ConnectionError):
    """The hub has exited. Views stay mapped; the run resumes from the trainer's checkpoint."""


class PeerLost(HookError, ConnectionError):
    """Another rank of the job has exited."""


class Stalled(HookError, TimeoutError):
    """A wait reached its deadline; the text says what is waiting for what."""


class HookStateError(HookError, RuntimeError):
    """A hook method was called in the wrong state (closed, forked, out of order)."""


class StaleView(HookError, RuntimeError):
    """A view was used after its record returned to the ring."""


class UnsplittableBatch(HookError, ValueError):
    """A batch cannot be split over the ranks; the text names both numbers."""


class WeightUpdateFailed(HookError, RuntimeError):
    """The engines did not load the new weights; they continue with their current version."""


class WeightsMismatch(HookError, ValueError):
    """The weights do not match the engines' model. Nothing was sent; the version is unchanged."""


class EvaluationFailed(HookError, ValueError):
    """An evaluation has an invalid data set or settings, or the run ended before it finished."""


class PublishFailed(HookError, OSError):
    """Weights could not be written for the engines; they keep their current version."""


class StreamBroken(HookError, ConnectionError):
    """Engines were lost while they received weights; a stream to the others may succeed."""
