"""A disk that is full, as far as one process is concerned."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def disk_of(num_bytes: int) -> Iterator[None]:
    """Files can be no longer than this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
