"""A time limit for user code that does not count the time it waits for engines.

Invariant: the clock runs only while user code itself runs.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Deadline:
    """A time limit for one call."""

    def __init__(self, limit_s: float, rule: str) -> None:
        """`rule`: error text for a call that exceeds the limit."""
        self.limit_s = limit_s
        self.rule = rule
        self.num_renewals = 0
        """How often `renew` was called."""
        self._left_s = limit_s
        self._num_pauses = 0
        self._timer: asyncio.TimerHandle | None = None
        self._on_over: Callable[[], None] | None = None

    def start(self, on_over: Callable[[], None]) -> None:
        """Start the clock; `on_over` is called once at the limit, unless `stop` comes first."""
        self._on_over = on_over
        self._run()

    def stop(self) -> None:
        """Stop the clock: the call has ended."""
        self._hold()
        self._on_over = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside this block."""
        self._num_pauses += 1
        self._hold()
        try:
            yield
        finally:
            self._num_pauses -= 1
            self._run()

    def renew(self) -> None:
        """Restart the full limit after progress."""
        self.num_renewals += 1
        self._hold()
        self._left_s = self.limit_s
        self._run()

    def expire(self, rule: str) -> None:
        """End the call now, for another reason."""
        self.rule = rule
        self._hold()
        self._over()

    def _hold(self) -> None:
        if self._timer is not None:
            self._left_s = max(0.0, self._timer.when() - asyncio.get_running_loop().time())
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        if self._timer is None and not self._num_pauses and self._on_over is not None:
            self._timer = asyncio.get_running_loop().call_later(self._left_s, self._over)

    def _over(self) -> None:
        self._timer = None
        on_over, self._on_over = self._on_over, None
        if on_over is not None:
            on_over()
