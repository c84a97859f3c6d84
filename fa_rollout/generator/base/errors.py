"""Errors that fail a sample and its group."""

from shm.errors import FaRolloutError


class SampleFailed(FaRolloutError, RuntimeError):
    """A sample cannot be made; its group fails. Text: a short kind, a colon, the facts."""


class SampleRefused(SampleFailed, ValueError):
    """A sample's fields are invalid or contradict each other; the text names the field."""
