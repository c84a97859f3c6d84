"""Tasks that outlive the call that started them, under one roof: none is lost, none fails unseen."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background:
    """A task group with a start and an end of its own."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._roof: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Ready for `spawn` when this returns."""
        ready = asyncio.Event()
        self._roof = asyncio.create_task(self._run(ready), name="engine-client-background")
        await ready.wait()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it ends, or until `aclose`. An exception of one task ends them all."""
        if self._group is None or self._stop.is_set():
            work.close()
            return
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def check(self) -> None:
        """Raise what a task has raised."""
        if self._roof is not None and self._roof.done():
            self._roof.result()

    async def aclose(self) -> None:
        """Cancel what runs and wait for its end; raises what a task has raised."""
        self._stop.set()
        if self._roof is not None:
            await self._roof

    async def _run(self, ready: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            ready.set()
            await self._stop.wait()
            for task in self._tasks:
                task.cancel()
