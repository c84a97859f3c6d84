"""Tasks whose failure is told as the one error that caused it, whatever user code raises in them."""

import asyncio
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


class EndedItself(RuntimeError):
    """User code raised what would have ended its task, or the process, in silence."""


@contextmanager
def contained() -> Iterator[None]:
    """Around user code: `sys.exit`, or a cancellation that nobody asked for, is an error like any other.

    asyncio stops the loop for the one, and takes a task with the other for one that was to be forgotten.

    Raises:
        EndedItself: in place of it.
    """
    try:
        yield
    except (Exception, GeneratorExit):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        ended = EndedItself(f"user code raised {type(error).__name__}: {error}")
        raise ended.with_traceback(error.__traceback__) from error
