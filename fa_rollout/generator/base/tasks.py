"""Tasks whose failure is told as the one error that caused it."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_error() -> Iterator[None]:
    """Raise the first error of a task group, in place of the group: the others are its consequence."""
    try:
        yield
    except BaseExceptionGroup as failures:
        error: BaseException = failures
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
