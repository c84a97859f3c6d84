"""Engines on a virtual clock: slots, decoding, pauses.

In: requests. Out: `started` when one gets a slot, `done` when it has all its tokens. Decoding is the fluid of
`decoder`: the requests of an engine share one progress.

What is modelled: a decode rate a request and one an engine, a number of slots, a time to the first token,
pauses. What is not: prompts that take their time from others, HTTP, Python.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import simpy

from fa_rollout.simulation.decoder import Decoder, Decoding
from fa_rollout.simulation.scenario import Scenario


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedRequest:
    """One sample of a group."""

    group: int
    attempt: int
    length: int
    version: int = -1
    """Oldest version that sampled one of its tokens."""
    job: Decoding | None = None
    engine: "SimulatedEngine | None" = None
    is_over: bool = False


@dataclass(slots=True, eq=False)
class SimulatedEngine:
    """One engine: who has its slots, and how far they are."""

    decoder: Decoder[Decoding]
    requests: dict[Decoding, SimulatedRequest] = field(default_factory=dict)
    num_taken: int = 0
    """Slots; a request has one before its first token."""
    timer: int = 0
    """Number of the timer that counts."""


class SimulatedEngines:
    """All engines, and the queue before them: oldest groups first, those that start again before all."""

    def __init__(
        self,
        env: simpy.Environment,
        scenario: Scenario,
        *,
        started: Callable[[SimulatedRequest], None],
        done: Callable[[SimulatedRequest], None],
    ) -> None:
        self._env, self._scenario = env, scenario
        self._started, self._done = started, done
        self._engines = [
            SimulatedEngine(Decoder(scenario.tokens_per_s, scenario.total_tokens_per_s))
            for _ in range(scenario.num_engines)
        ]
        self._queue: list[tuple[bool, int, int, SimulatedRequest]] = []
        self._serial = itertools.count()
        self._is_paused = False
        self._busy_slot_s = self._counted_s = 0.0

    @property
    def busy_slot_s(self) -> float:
        """Slots taken, integrated over time."""
        self._count()
        return self._busy_slot_s

    def submit(self, request: SimulatedRequest) -> None:
        """A request waits for a slot."""
        heapq.heappush(self._queue, (request.attempt == 0, request.group, next(self._serial), request))
        self._fill()

    def cancel(self, request: SimulatedRequest) -> None:
        """End a request as it is; `done` is not called."""
        request.is_over = True
        engine = request.engine
        if engine is not None:
            self._leave(engine, request)
            self._fill()

    def pause(self) -> None:
        """Pause all engines."""
        self._is_paused = True
        for engine in self._engines:
            engine.decoder.advance(self._env.now)
            engine.decoder.freeze()
            self._arm(engine)

    def resume(self, *, restart: bool) -> list[SimulatedRequest]:
        """Continue all engines; with `restart`, unfinished requests restart and are returned."""
        self._is_paused = False
        again: list[SimulatedRequest] = []
        for engine in self._engines:
            engine.decoder.advance(self._env.now)
            engine.decoder.thaw()
            if restart:
                again += engine.requests.values()
                for job in engine.requests:
                    engine.decoder.leave(job)
                    job.made_before = 0
                    engine.decoder.join(job)
            self._arm(engine)
        self._fill()
        return again

    # --- inside -----------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Begin requests while there is a slot; the engine with the most free ones takes the next."""
        while self._queue and not self._is_paused:
            engine = min(self._engines, key=lambda engine: engine.num_taken)
            if engine.num_taken >= self._scenario.num_slots:
                return
            request = heapq.heappop(self._queue)[-1]
            if request.is_over:
                continue
            self._count()
            engine.num_taken += 1
            request.engine = engine
            self._started(request)
            if self._scenario.prefill_s:
                first_token = self._env.timeout(self._scenario.prefill_s)
                assert first_token.callbacks is not None
                first_token.callbacks.append(partial(self._decode, engine, request))
            else:
                self._decode(engine, request)

    def _decode(
        self, engine: SimulatedEngine, request: SimulatedRequest, event: simpy.Event | None = None
    ) -> None:
        if request.is_over:
            return
        engine.decoder.advance(self._env.now)
        job = Decoding(length=request.length)
        request.job = job
        engine.requests[job] = request
        engine.decoder.join(job)
        self._arm(engine)

    def _arm(self, engine: SimulatedEngine) -> None:
        """A timer for the engine's next finish; one that was set before counts no more."""
        engine.timer += 1
        left_s = engine.decoder.next_finish_s()
        if left_s is not None:
            timer = self._env.timeout(left_s)
            assert timer.callbacks is not None
            timer.callbacks.append(partial(self._finish, engine, engine.timer))

    def _finish(self, engine: SimulatedEngine, timer: int, event: simpy.Event) -> None:
        if timer != engine.timer:
            return
        engine.decoder.advance(self._env.now)
        finished = [engine.requests.pop(job) for job in engine.decoder.finished()]
        self._count()
        engine.num_taken -= len(finished)
        self._arm(engine)
        self._fill()
        for request in finished:
            request.is_over, request.engine = True, None
            self._done(request)

    def _leave(self, engine: SimulatedEngine, request: SimulatedRequest) -> None:
        engine.decoder.advance(self._env.now)
        self._count()
        engine.num_taken -= 1
        request.engine = None
        if request.job is not None:
            request.job.is_over = True
            engine.decoder.leave(request.job)
            del engine.requests[request.job]
        self._arm(engine)

    def _count(self) -> None:
        taken = sum(engine.num_taken for engine in self._engines)
        self._busy_slot_s += taken * (self._env.now - self._counted_s)
        self._counted_s = self._env.now
