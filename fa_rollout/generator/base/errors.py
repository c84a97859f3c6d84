"""Why a sample, and with it its group, cannot become a record."""

from shm.errors import FaRolloutError


class SampleFailed(FaRolloutError, RuntimeError):
    """A sample that cannot be made: its group ends as failed. The text: a short kind, a colon, the facts."""


class SampleRefused(SampleFailed, ValueError):
    """A sample whose fields contradict each other or hold no truth; the text names the field."""
