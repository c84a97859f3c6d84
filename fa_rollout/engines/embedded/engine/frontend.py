"""The event loop's side of the engine: who waits for which request.

Every request that is submitted is live until its last event; a rid is live once. Whoever stops waiting
early, as when a client hangs up, aborts.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from fa_rollout.engines.embedded.engine.engine import EngineEvent, StepEngine
from fa_rollout.engines.embedded.engine.worker import Worker
from fa_rollout.engines.embedded.errors import EngineStopped, RefusedRequest
from fa_rollout.engines.embedded.model.request import GenerationRequest

Result = TypeVar("Result")
STOP_TIMEOUT_S = 2.0


class PendingReply:
    """One live request: what its latest event told."""

    __slots__ = ("_changed", "is_last", "is_lost", "num_output", "request")

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.num_output = 0
        self.is_last = False
        self.is_lost = False
        self._changed = asyncio.Event()

    def tell(self, num_output: int, *, is_last: bool) -> None:
        self.num_output = num_output
        self.is_last = is_last
        self._changed.set()

    def lose(self) -> None:
        """The engine died."""
        self.is_lost = True
        self._changed.set()

    async def progress(self) -> None:
        """Wait for the next event; a slow reader sees only the newest. Raises EngineStopped."""
        await self._changed.wait()
        self._changed.clear()
        if self.is_lost:
            raise EngineStopped("the engine died while it ran this request; see its log.")


class Frontend:
    """Live requests, and calls into the engine's thread."""

    def __init__(
        self,
        engine: StepEngine,
        *,
        ended: asyncio.Event,
        num_threads: int,
        max_queued_requests: int | None = None,
    ) -> None:
        """`ended` is set if the engine dies."""
        self.engine = engine
        self.has_died = False
        self._ended = ended
        self._is_stopping = False
        self._max_queued_requests = max_queued_requests
        self._live: dict[str, PendingReply] = {}
        self._loop = asyncio.get_running_loop()
        self._worker = Worker(
            engine,
            num_threads=num_threads,
            on_events=lambda events: self._post(self._deliver, events),
            on_death=lambda: self._post(self._die),
        )

    @property
    def is_alive(self) -> bool:
        return self._worker.is_alive

    def start(self) -> None:
        self._worker.start()

    async def stop(self) -> None:
        """Abort what is live, so that it is answered, and end the engine's thread."""
        self._is_stopping = True
        with contextlib.suppress(TimeoutError, EngineStopped):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.call(self.engine.abort_all)
        await asyncio.to_thread(self._worker.stop, STOP_TIMEOUT_S)
        self._lose_all()

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run `function` in the engine's thread, between two steps."""
        return await asyncio.wrap_future(self._worker.call(function))

    def submit(self, requests: Sequence[GenerationRequest]) -> list[PendingReply]:
        """Hand requests to the engine, all or none."""
        for request in requests:
            if request.rid in self._live:
                raise RefusedRequest(f"Duplicate request ID detected: {request.rid}")
        if self._is_stopping or not self._worker.is_alive:
            raise EngineStopped("the engine is stopping; send the request to another one.")
        self._check_queue()
        tickets = [PendingReply(request) for request in requests]
        self._live.update((ticket.request.rid, ticket) for ticket in tickets)
        self._worker.call(lambda: self.engine.submit(requests))
        return tickets

    def abort(self, tickets: Iterable[PendingReply]) -> None:
        """End those of `tickets` that still run; does not wait."""
        doomed = {id(ticket.request) for ticket in tickets if not ticket.is_last}
        if doomed:
            self._worker.call(lambda: self.engine.abort(lambda request: id(request) in doomed))

    def abort_rid(self, rid: str) -> None:
        """As SGLang: the rid must be live, and then every rid that it begins is meant."""
        if rid and rid in self._live:
            self._worker.call(lambda: self.engine.abort(lambda request: request.rid.startswith(rid)))

    def abort_all(self) -> None:
        self._worker.call(self.engine.abort_all)

    def _check_queue(self) -> None:
        limit = self._max_queued_requests
        if limit is None or self.engine.statistics().num_waiting < limit:
            return
        text = "The request queue is full."
        body = {"object": "error", "message": text, "type": "503", "param": None, "code": 503}
        raise RefusedRequest(text, status=503, body=body)

    def _deliver(self, events: list[EngineEvent]) -> None:
        for event in events:
            ticket = self._live[event.request.rid]
            if event.is_last:
                del self._live[event.request.rid]
            ticket.tell(event.num_output, is_last=event.is_last)

    def _die(self) -> None:
        self.has_died = True
        self._ended.set()
        self._lose_all()

    def _lose_all(self) -> None:
        for ticket in self._live.values():
            ticket.lose()

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        # The loop may be gone in the last moments of the process
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)
