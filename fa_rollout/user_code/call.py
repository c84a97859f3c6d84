"""One call of user code in the event loop, in a task of its own.

| user code | its caller gets |
|---|---|
| returns | the result |
| raises anything, `SystemExit` and `GeneratorExit` too | `UserCodeFailed` |
| cancels its own task, or lets a cancellation of its own leak out | `UserCodeFailed` |
| does not return in its time | `UserCodeTimedOut`, with the line it is on, and it is cancelled |
| goes on for longer than `CANCEL_S` after that | the same; it is left behind, and the log says so |

Invariant: a call ends once, by its result or one failure; a cancellation of the caller is passed on to it.
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
"""How long a cancelled call may take to end before it is left behind."""
_NUM_LOOKS = 8
"""Looks at where a call is, within its deadline."""

IN_USER_CODE: ContextVar[bool] = ContextVar("fa_rollout_in_user_code", default=False)
"""Set in the context of user code, and of all tasks that it starts."""


class UserCall(Generic[T]):
    """A call that has begun."""

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
            what: kind of user code, such as "generate": the first word of every failure.
            call: calls the user's function; what it returns is awaited where that is possible.
            function: the user's; named where no frame of a failed call is known.
            passes: errors that come from this project through user code, and are raised as they are.
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
        """What the user's function returned; a cancellation of this ends the call.

        Raises:
            UserCodeFailed: it gave none.
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
        """Cancel it; one that does not end within `CANCEL_S` is left behind."""
        self.cancel()
        if not self._ended.done():
            await asyncio.wait({self._ended})

    def cancel(self) -> None:
        """Ask it to end, as far as it runs."""
        if not self.task.done() and not self.is_cancelled:
            self.is_cancelled = True
            self.task.cancel()
            asyncio.get_running_loop().call_later(CANCEL_S, self._leave_behind)

    def _returned(self) -> T:
        if self.task.cancelled():
            text = "it cancelled its own task, or was cancelled, and the run did not ask for that"
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
        """Note where it is, and since when."""
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
            logger.error("%s ignores its cancellation and is left behind%s", self._what, at)
            self._finish()

    def _on_done(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled():
            task.exception()  # seen: one that was left behind is asked for nothing
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
    """Call user code, plain or async, to its end; the arguments are those of `UserCall`.

    Raises:
        UserCodeFailed: it gave no result.
    """
    return await UserCall[Any](what, call, function=function, deadline=deadline, passes=passes).result()


async def run_to_end(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """(result, None) or (None, error): the body of a call's task.

    The exceptions by which Python ends a program would end the event loop, were they to leave the task.
    """
    IN_USER_CODE.set(True)
    try:
        found = call()
        return (await found if inspect.isawaitable(found) else found), None
    except BaseException as error:
        return None, error
