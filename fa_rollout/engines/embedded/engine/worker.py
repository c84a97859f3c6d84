"""The one thread that owns the engine.

Calls come in through a queue and run between steps; events go out after each step and before the result of
the call that caused them. An error of the engine ends the thread, fails what waits and is told once.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from fa_rollout.engines.embedded.engine.engine import EngineEvent, StepEngine
from fa_rollout.engines.embedded.errors import EngineStopped

Result = TypeVar("Result")
Call = tuple[Callable[[], Any], "Future[Any]"]

logger = logging.getLogger(__name__)


class Worker:
    """Steps an engine for as long as it has work, and runs calls in between."""

    def __init__(
        self,
        engine: StepEngine,
        *,
        num_threads: int,
        on_events: Callable[[list[EngineEvent]], None],
        on_death: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._num_threads = num_threads
        self._on_events = on_events
        self._on_death = on_death
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._is_stopping = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_stopping

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        """Run `function` in the engine's thread, between two steps."""
        future: Future[Result] = Future()
        # Under the lock: a call that came after the last one was failed would never be answered
        with self._closing:
            if self._is_stopping:
                future.set_exception(_stopped())
            else:
                self._calls.put((function, future))
        return future

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its current step; whether it ended in time."""
        self._close()
        self._calls.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._num_threads)
            while not self._is_stopping:
                self._take_calls()
                if self._engine.has_work:
                    self._engine.step()
                self._hand_on_events()
        except BaseException:
            logger.exception("engine died")
            self._close()
            self._on_death()
        finally:
            self._fail_calls()

    def _close(self) -> None:
        """Take no further calls."""
        with self._closing:
            self._is_stopping = True

    def _take_calls(self) -> None:
        """Run all that is queued; wait for a call if there is nothing else to do."""
        call = None
        try:
            call = self._calls.get(block=not self._engine.has_work)
            while call is not None:
                self._run_call(*call)
                call = self._calls.get_nowait()
        except Empty:
            return

    def _run_call(self, function: Callable[[], Any], future: "Future[Any]") -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except Exception as error:  # the caller's to handle: it gets the very error
            future.set_exception(error)
            return
        self._hand_on_events()
        future.set_result(result)

    def _hand_on_events(self) -> None:
        events = self._engine.take_events()
        if events:
            self._on_events(events)

    def _fail_calls(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            if call is not None and call[1].set_running_or_notify_cancel():
                call[1].set_exception(_stopped())


def _stopped() -> EngineStopped:
    return EngineStopped("the engine has stopped; start it again.")
