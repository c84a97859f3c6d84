"""Interrupts user code that blocks the event loop, before the hub considers the whole generator dead.

In: a limit. Out: `LoopBlocked`, raised in the user's own line by a signal to the loop's thread.

Invariant: it is raised only while user code blocks the loop, never in this project's own code. Time in which
this process did not run at all (a stopped or overloaded machine) does not count.
"""

import asyncio
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Self

from fa_rollout.user_code import place
from fa_rollout.user_code.call import IN_USER_CODE

_SIGNAL = signal.SIGRTMAX - 6
_NUM_LOOKS = 10
"""Checks within the limit; the loop must be blocked at all of them."""


class LoopBlocked(BaseException):
    """User code blocked the event loop. Not an `Exception`, so that user code rarely catches it."""


class LoopGuard:
    """A thread that watches the running loop inside a `with` block."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._period_s = limit_s / _NUM_LOOKS
        self._loop: asyncio.AbstractEventLoop
        self._num_missed = 0
        """Consecutive checks at which the loop was blocked."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="loop-guard")

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._main = threading.get_ident()
        signal.signal(_SIGNAL, self._on_signal)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(2 * self._period_s)
        signal.signal(_SIGNAL, signal.SIG_IGN)

    def _watch(self) -> None:
        looked_s = time.monotonic()
        while not self._over.wait(self._period_s):
            now_s = time.monotonic()
            self._num_missed = self._num_missed + 1 if now_s - looked_s < 3 * self._period_s else 0
            looked_s = now_s
            if self._num_missed > _NUM_LOOKS:
                signal.pthread_kill(self._main, _SIGNAL)
            try:
                self._loop.call_soon_threadsafe(self._turned)
            except RuntimeError:
                return  # the loop is closed

    def _turned(self) -> None:
        self._num_missed = 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._num_missed > _NUM_LOOKS and IN_USER_CODE.get() and _is_in_user_code(frame):
            raise LoopBlocked(
                f"it blocked the event loop, and with it all other samples, for {self._limit_s:g} s; "
                "await slow work, or run it in asyncio.to_thread or in a separate process"
            )


def _is_in_user_code(frame: FrameType | None) -> bool:
    """Whether the innermost frame outside libraries and the standard library is user code."""
    while frame is not None:
        whose = place.owner_of(frame.f_code.co_filename)
        if whose in (place.Owner.USER, place.Owner.PROJECT):
            return whose is place.Owner.USER
        frame = frame.f_back
    return False
