"""The pool of reward workers: items in, outcomes out, each item exactly once.

Items wait in one queue, oldest first, and go to the worker with the least before it. A worker gets a few
ahead so that it never idles; when its current item turns out slow, those it has not begun come back to the
front of the queue. An item that runs beyond its time is ended with its worker. A worker that dies is
replaced, with a back-off, and the item it was on is tried once more.

| who waits        | for whom             | unblocked by                                                |
|------------------|----------------------|-------------------------------------------------------------|
| `score`          | the items' outcomes  | answers; timeouts; second death; `close`; the pool given up |
| an item          | a worker with room   | an answer, an item taken back, a worker started             |
| a worker's place | its back-off         | the supervisor's tick                                       |
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable

from fa_rollout.config import ConfigError
from fa_rollout.rewards.function import FunctionKind
from fa_rollout.rewards.outcomes import FailureReason, RewardFailed, RewardOutcome, RewardsLost
from fa_rollout.rewards.workers import wire
from fa_rollout.rewards.workers.item import Item, ScoringJob
from fa_rollout.rewards.workers.place import WorkerEnding, WorkerPlace, WorkerVerdict, judge, next_window
from fa_rollout.rewards.workers.process import Death, WorkerProcess
from fa_rollout.rewards.workers.protocol import Done, WorkerReady, WorkerRefused, WorkerSetup
from fa_rollout.sample import Sample

logger = logging.getLogger(__name__)

TICK_S = 0.02
CLOSE_S = 2.0
MAX_FAILED_STARTS = 5


class RewardWorkersLost(RewardsLost):
    """No worker process can be started any more: there will be no outcome."""


class WorkerPool:
    """A fixed number of worker processes, on one event loop."""

    def __init__(self, setup: WorkerSetup, *, num_workers: int, timeout_s: float) -> None:
        self._setup = setup
        self._timeout_s = timeout_s
        self._places = [WorkerPlace() for _ in range(num_workers)]
        self._queue: deque[Item] = deque()
        self._endings: list[WorkerEnding] = []
        self._num_tickets = 0
        self.num_restarts = 0
        """Workers that replaced others."""
        self.busy_s = 0.0
        """Time that workers spent in the function, all together."""
        self._open = False
        self._supervisor: asyncio.Task[None] | None = None
        self._started: asyncio.Future[FunctionKind]
        self._has_started = False
        self._lost: RewardWorkersLost | None = None

    async def start(self) -> FunctionKind:
        """Start the workers; returns when each has loaded the function, with how it wants to be called.

        Raises:
            ConfigError: the function cannot be loaded.
        """
        self._started = asyncio.get_running_loop().create_future()
        self._open = True
        for place in self._places:
            self._move_in(place)
        self._supervisor = asyncio.create_task(self._supervise(), name="reward-supervisor")
        try:
            return await self._started
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Kill the workers and wait until they are gone, `CLOSE_S` at most; what is unfinished is CLOSED."""
        if not self._open:
            return
        self._open = False
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        for place in self._places:
            if place.process is not None:
                self._end(place, "the runner was closed")
        closed = RewardFailed(reason=FailureReason.CLOSED, text="the run ended before the reward was there")
        for item in self._take_all_items():
            item.finish(closed)
        await self._wait_for_ends()

    async def _wait_for_ends(self) -> None:
        deadline = time.monotonic() + CLOSE_S
        while self._reap() and time.monotonic() < deadline:  # noqa: ASYNC110 - the kernel sends no event
            await asyncio.sleep(0.005)
        for ending in self._endings:
            logger.error("reward worker does not end after SIGKILL pid=%d", ending.process.pid)

    @property
    def num_ready(self) -> int:
        return sum(place.ready for place in self._places)

    async def score(self, samples: list[Sample]) -> list[RewardOutcome]:
        """One outcome a sample, in order.

        Raises:
            RewardWorkersLost: workers cannot be started any more.
        """
        if self._lost is not None:
            raise self._lost
        future = asyncio.get_running_loop().create_future()
        job = ScoringJob(outcomes=[None] * len(samples), future=future, num_left=len(samples))
        first = 0
        for call in self._setup.shape.items(samples):
            self._enqueue(call, job, first)
            first += len(call)
        self._feed()
        if job.num_left:
            await future
        return [outcome for outcome in job.outcomes if outcome is not None]

    def _enqueue(self, samples: list[Sample], job: ScoringJob, first: int) -> None:
        self._num_tickets += 1
        item = Item(ticket=self._num_tickets, job=job, first=first, samples=samples)
        if not self._open:
            item.finish(RewardFailed(reason=FailureReason.CLOSED, text="the runner is closed"))
        else:
            self._queue.append(item)

    def _feed(self) -> None:
        """Send waiting items to workers with room, the oldest to the one with the least before it."""
        while self._queue:
            place = min(filter(WorkerPlace.has_room, self._places), key=lambda p: len(p.items), default=None)
            if place is None or place.process is None:
                return
            item = self._queue[0]
            if item.job.future.done() or not self._packed(item):
                self._queue.popleft()
            elif place.process.send(item.ticket, item.payload):
                self._queue.popleft()
                place.take_in(item)
            else:
                return

    def _packed(self, item: Item) -> bool:
        """Pickle an item's samples; False where they cannot be, and the item has ended."""
        if item.payload:
            return True
        try:
            item.payload = wire.dump(item.samples)
        # Metadata and labels may hold anything, and each kind of object fails in its own way.
        except Exception as error:
            text = f"a sample must be picklable to reach a reward worker: {type(error).__name__}: {error}"
            item.finish(RewardFailed(reason=FailureReason.NOT_SENT, text=text))
            return False
        return True

    def _requeue(self, items: Iterable[Item]) -> None:
        """Back to the front of the queue, in order of age."""
        self._queue.extendleft(sorted(items, key=lambda item: item.ticket, reverse=True))

    def _take_all_items(self) -> list[Item]:
        held = [place.items for place in self._places] + [ending.items for ending in self._endings]
        found = [item for items in held for item in items.values()] + list(self._queue)
        for items in held:
            items.clear()
        self._queue.clear()
        return found

    def _on_readable(self, place: WorkerPlace) -> None:
        try:
            self._on_answers(place)
        # A fault of this package: unless it is passed on, those who wait would never be told.
        except Exception as error:
            self._give_up(f"an answer of a reward worker cannot be read: {error!r}", error)

    def _on_answers(self, place: WorkerPlace) -> None:
        """Take in whatever a worker has sent."""
        assert place.process is not None
        for ticket, answer in place.process.receive():
            match answer:
                case WorkerReady(kind):
                    self._on_ready(place, kind)
                case WorkerRefused(text):
                    self._on_failed_start(place, text)
                    return
                case Done(outcomes, elapsed_s):
                    place.items.pop(ticket).finish(outcomes)
                    self.busy_s += elapsed_s
                    place.num_deaths = 0
                    place.since_s = time.monotonic()
                    place.window = next_window(place.window, elapsed_s)
        self._feed()

    def _on_ready(self, place: WorkerPlace, kind: FunctionKind) -> None:
        place.ready = True
        place.num_failed_starts = 0
        if not self._started.done() and all(p.ready for p in self._places):
            self._has_started = True
            self._started.set_result(kind)

    async def _supervise(self) -> None:
        try:
            while True:
                await asyncio.sleep(TICK_S)
                self._tick(time.monotonic())
        # As in `_on_readable`.
        except Exception as error:
            self._give_up(f"the supervisor failed: {error!r}", error)
            raise

    def _tick(self, now_s: float) -> None:
        for place in self._places:
            if place.process is not None:
                self._look_after(place, place.process, now_s)
            elif now_s >= place.start_at_s and self._lost is None:
                self.num_restarts += 1
                self._move_in(place)
        self._reap()
        self._feed()

    def _look_after(self, place: WorkerPlace, process: WorkerProcess, now_s: float) -> None:
        if (death := process.died()) is not None:
            self._on_death(place, process, death)
            return
        running_s = now_s - place.since_s
        match judge(place.ready, len(place.items), running_s=running_s, timeout_s=self._timeout_s):
            case WorkerVerdict.NOT_LOADED:
                self._on_failed_start(place, f"the function was not loaded in {running_s:.0f} s")
            case WorkerVerdict.OVERDUE:
                self._end(place, "a reward ran too long", overdue=next(iter(place.items.values())))
            case WorkerVerdict.BEHIND:
                place.window = 1
                self._requeue([place.items.pop(ticket) for ticket in process.take_back()])

    def _on_death(self, place: WorkerPlace, process: WorkerProcess, death: Death) -> None:
        self._on_answers(place)
        if place.process is not process:
            return
        if not place.ready:
            text = f"the worker ended with {death.text} before the function was loaded"
            self._on_failed_start(place, text, by_signal=death.by_signal)
            return
        logger.warning("reward worker died pid=%d cause=%s", process.pid, death.text)
        self._end(place, death.text)
        place.back_off(time.monotonic())

    def _move_in(self, place: WorkerPlace) -> None:
        place.since_s = time.monotonic()
        try:
            place.process = WorkerProcess(self._setup)
        except OSError as error:
            self._on_failed_start(place, f"a worker process cannot be started: {error}")
            return
        asyncio.get_running_loop().add_reader(place.process.channel, self._on_readable, place)

    def _on_failed_start(self, place: WorkerPlace, text: str, *, by_signal: bool = False) -> None:
        """What fails by itself at the very start would fail again; what was killed may not be."""
        if place.process is not None:
            self._end(place, text)
        may_try_again = self._has_started or (by_signal and place.num_failed_starts + 1 < MAX_FAILED_STARTS)
        if not may_try_again:
            if not self._started.done():
                self._started.set_exception(ConfigError(text))
            return
        place.back_off(time.monotonic())
        place.num_failed_starts += 1
        logger.warning("reward worker did not start attempt=%d cause=%s", place.num_failed_starts, text)
        if all(p.num_failed_starts >= MAX_FAILED_STARTS for p in self._places):
            self._give_up(f"reward workers cannot be started any more, the last one because: {text}")

    def _give_up(self, text: str, cause: BaseException | None = None) -> None:
        self._lost = RewardWorkersLost(text)
        self._lost.__cause__ = cause
        if not self._started.done():
            self._started.set_exception(self._lost)
        for item in self._take_all_items():
            if not item.job.future.done():
                item.job.future.set_exception(self._lost)

    def _end(self, place: WorkerPlace, cause: str, overdue: Item | None = None) -> None:
        """Kill a worker and free its place; its items are settled when it is gone for certain."""
        process = place.process
        assert process is not None
        asyncio.get_running_loop().remove_reader(process.channel)
        process.kill()
        self._endings.append(WorkerEnding(process, place.take_away(), cause, overdue))

    def _reap(self) -> bool:
        """Settle what the workers held that are gone now; whether some are not yet."""
        gone = [ending for ending in self._endings if ending.process.reaped()]
        self._endings = [ending for ending in self._endings if ending not in gone]
        for ending in gone:
            self._requeue(ending.settle(self._timeout_s))
            ending.process.close()
        return bool(self._endings)
