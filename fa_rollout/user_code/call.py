"""One call of user code, in its own task of the event loop.

| user code | its caller gets |
|---|---|
| returns | the result |
| raises anything, even `SystemExit` or `GeneratorExit` | `UserCodeFailed` |
| cancels its own task, or lets a cancellation leak out | `UserCodeFailed` |
| does not return before its deadline | `UserCodeTimedOut` with its current line; the call is cancelled |
| still runs `CANCEL_S` after that | the same; the call is abandoned and an error is logged |

Invariant: a call ends once, with its result or one failure. Cancelling the caller cancels the call.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from fa_rollout.user_code import place
from fa_rollout.user_code.deadline import Deadline
from fa_rollout.user_code.failure import UserCodeFailed, UserCodeTimedOut, failed
from fa_rollout.user_code.place import CodePlace

logger = logging.getLogger(__name__)
T = TypeVar("T")

CANCEL_S = 1.0
"""How long a cancelled call may take to end before it is abandoned."""
_NUM_LOOKS = 8
"""How often the current line of a call is sampled within its deadline."""

IN_USER_CODE: ContextVar[bool] = ContextVar("fa_rollout_in_user_code", default=False)
"""True in user code and in all tasks that it starts."""


class UserCall(Generic[T]):
    """A running call."""

    def __init__(
        self,
        what: str,
        call: Callable[[], Any],
        *,
        function: Any = None,
        deadline: Deadline | None = None,
        passes: tuple[type[BaseException], ...] = (),
    ) -> None:
        """
        Args:
            what: kind of user code, such as "generate"; every failure text begins with it.
            call: calls the user's function; an awaitable result is awaited.
            function: the user's function, named in failures when no frame of the call is known.
            passes: errors of this project that are raised unchanged when they come out of user code.
        """
        self._what, self._function, self._passes, self._deadline = what, function, passes, deadline
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._failure: UserCodeFailed | None = None
        self.is_cancelled = False
        self._at: CodePlace | None = None
        self._since_s = loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[tuple[T | None, BaseException | None]]
        self.task = loop.create_task(run_to_end(call), name=what)
        self.task.add_done_callback(self._on_done)
        if deadline is not None:
            deadline.start(self._on_over)
            self._look(deadline.limit_s / _NUM_LOOKS)

    async def result(self) -> T:
        """What the user's function returned. Cancelling this ends the call.

        Raises:
            UserCodeFailed: the function did not return a result.
        """
        try:
            await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            await self.end()
            raise
        if self._failure is not None:
            raise self._failure
        return self._returned()

    async def end(self) -> None:
        """Cancel the call, and abandon it if it does not end within `CANCEL_S`."""
        self.cancel()
        if not self._ended.done():
            await asyncio.wait({self._ended})

    def cancel(self) -> None:
        """Cancel the call if it still runs, without waiting."""
        if not self.task.done() and not self.is_cancelled:
            self.is_cancelled = True
            self.task.cancel()
            asyncio.get_running_loop().call_later(CANCEL_S, self._leave_behind)

    def _returned(self) -> T:
        if self.task.cancelled():
            text = "it was cancelled, but not by the run"
            where = place.in_words(self._at or place.of_function(self._function))
            raise UserCodeFailed(f"{self._what}: CancelledError: {text}{where}")
        result, error = self.task.result()
        if error is None:
            return result  # type: ignore[return-value]
        if isinstance(error, self._passes):
            raise error
        raise failed(self._what, error) from error

    # --- time -------------------------------------------------------------------------------------

    def _look(self, period_s: float) -> None:
        """Record the call's current line, and since when it has been there."""
        if self.task.done():
            return
        loop = asyncio.get_running_loop()
        at = place.of_task(self.task)
        if at != self._at:
            self._at, self._since_s = at, loop.time()
        self._timer = loop.call_later(period_s, self._look, period_s)

    def _on_over(self) -> None:
        if self.task.done():
            return
        assert self._deadline is not None
        at = place.of_task(self.task) or place.of_function(self._function)
        now_s = asyncio.get_running_loop().time()
        since = f" for {now_s - self._since_s:.3g} s" if at == self._at else ""
        where = f"; it has been at {at}{since}" if at else ""
        self._failure = UserCodeTimedOut(f"{self._what}: timeout: {self._deadline.rule}{where}")
        self.cancel()

    def _leave_behind(self) -> None:
        if not self.task.done() and not self._ended.done():
            at = place.in_words(place.of_task(self.task))
            logger.error("%s ignored its cancellation and was abandoned%s", self._what, at)
            self._finish()

    def _on_done(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled():
            task.exception()  # retrieved here, since nobody awaits an abandoned task
        self._finish()

    def _finish(self) -> None:
        if self._deadline is not None:
            self._deadline.stop()
        if self._timer is not None:
            self._timer.cancel()
        if not self._ended.done():
            self._ended.set_result(None)


async def run(
    what: str,
    call: Callable[[], Any],
    *,
    function: Any = None,
    deadline: Deadline | None = None,
    passes: tuple[type[BaseException], ...] = (),
) -> Any:
    """Call user code, plain or async, and return its result. Arguments as for `UserCall`.

    Raises:
        UserCodeFailed: it did not return a result.
    """
    return await UserCall[Any](what, call, function=function, deadline=deadline, passes=passes).result()


async def run_to_end(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """The body of a call's task: returns (result, None) or (None, error).

    All exceptions are caught, since `SystemExit` and `KeyboardInterrupt` leaving a task end the event loop.
    """
    IN_USER_CODE.set(True)
    try:
        found = call()
        return (await found if inspect.isawaitable(found) else found), None
    except BaseException as error:
        return None, error
