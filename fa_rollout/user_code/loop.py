"""The generator's event loop: user code cannot stop it or cancel the generator's own tasks.

| user code | without this |
|---|---|
| raises `SystemExit` or `KeyboardInterrupt` in its own task or callback | the loop ends |
| cancels `asyncio.all_tasks()` | the generator keeps running but does no work |
"""

import asyncio
import logging
import socket
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fa_rollout.process.own_threads import NUM_USER_THREADS, in_thread
from fa_rollout.user_code import place
from fa_rollout.user_code.call import IN_USER_CODE

logger = logging.getLogger(__name__)

_FINISH_S = 1.0


class HardenedLoop(asyncio.SelectorEventLoop):
    """An event loop that user code cannot end."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._hidden: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.set_default_executor(ThreadPoolExecutor(NUM_USER_THREADS, thread_name_prefix="user-code"))
        self.set_task_factory(self._make_task)

    def _run_once(self) -> None:
        """The task keeps the exception for its awaiter; remaining callbacks run in the next iteration."""
        try:
            super()._run_once()  # type: ignore[misc]
        except (SystemExit, KeyboardInterrupt) as error:
            where = place.in_words(place.of_error(error))
            logger.error("user code raised %s in the event loop%s", type(error).__name__, where)

    @staticmethod
    def _make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
        task = asyncio.Task(work, loop=loop, **options)
        if not IN_USER_CODE.get():
            assert isinstance(loop, HardenedLoop)
            loop._hidden.add(task)
            asyncio.tasks._unregister_task(task)
        return task

    async def finish(self) -> None:
        """Cancel all remaining tasks; a task of user code that ignores it is abandoned."""
        left = {task for task in (*self._hidden, *asyncio.all_tasks()) if not task.done()}
        left -= {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_FINISH_S)

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        """Resolve names in threads of our own, so that user code's threads cannot delay it."""
        return await in_thread(socket.getaddrinfo, host, port, **options)
