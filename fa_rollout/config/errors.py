"""What a configuration that cannot be run raises."""

from shm.errors import FaRolloutError


class ConfigError(FaRolloutError, ValueError):
    """A configuration that cannot be run; the text names the key, the value and the way out."""
