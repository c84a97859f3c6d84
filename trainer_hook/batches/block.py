"""A `with` block that makes a hook call on entry and on exit.

Not a `contextlib.contextmanager`, because entering may raise EndOfData, which is a StopIteration, and a
block that is never entered must do nothing.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Block(Generic[T]):
    """Passes the result of `enter` to the block; calls `leave` with the block's exception, or None."""

    def __init__(self, enter: Callable[[], T], leave: Callable[[BaseException | None], None]) -> None:
        self._enter = enter
        self._leave = leave

    def __enter__(self) -> T:
        return self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)
