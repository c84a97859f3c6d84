"""Which request goes to which engine, and when: slots, first come first served.

In: requests that want a slot; engines' windows, circuits and pauses. Out: one lane per request.
Invariants: a freed slot goes to the oldest waiter at once; no lane exceeds its window; a slot returns once.
"""

import asyncio
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from fa_rollout.client.base.circuit import Circuit, Window
from fa_rollout.client.base.policy import FailurePolicy


class Balance(StrEnum):
    """How a request finds its engine."""

    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"
    STICKY = "sticky"
    """By routing key: requests of one key share an engine, and so its prefix cache."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lane:
    """One dispatch target: an engine, or a router."""

    url: str
    window: Window
    circuit: Circuit
    in_flight: int = 0
    slot_s: float = 0.0
    """Its requests, integrated over time until `moved_s`."""
    moved_s: float = field(default_factory=time.monotonic)
    bound: deque["_Waiter"] = field(default_factory=deque)
    """Waiters that want this lane and no other."""
    is_leaving: bool = False
    """It gets no more requests; those that it has may end."""

    @classmethod
    def to(cls, url: str, capacity: int, policy: FailurePolicy) -> "Lane":
        """A lane for this many requests at once."""
        circuit = Circuit(policy.circuit_failures, policy.max_untrue, policy.untrue_rest_s)
        return cls(url=url, window=Window(capacity), circuit=circuit)

    def move(self, change: int) -> None:
        """Requests come or go."""
        now_s = time.monotonic()
        self.slot_s += self.in_flight * (now_s - self.moved_s)
        self.moved_s = now_s
        self.in_flight += change

    @property
    def is_usable(self) -> bool:
        """Whether requests may wait for it."""
        return not self.circuit.is_open and not self.is_leaving

    def has_room(self, now: float) -> bool:
        """True when a request may be sent now."""
        return self.in_flight < self.window.allowed and self.is_usable and now >= self.window.not_before


_NONE: frozenset[Lane] = frozenset()


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    future: asyncio.Future[Lane]
    ticket: int
    """Order of arrival; a retry keeps the one it had."""
    key: str | None
    avoid: Lane | None
    """The lane that just failed this request: another one is taken when one has room."""
    barred: frozenset[Lane]
    """Lanes that get it only when no other can be used."""


class LaneDispatcher:
    """Hands out slots."""

    def __init__(self, lanes: list[Lane], balance: Balance = Balance.LEAST_LOADED) -> None:
        self.lanes = lanes
        self._balance = balance
        self._waiters: deque[_Waiter] = deque()
        self.is_held = False
        """Nothing is granted: engines are paused."""
        self._turn = 0
        self._next_ticket = 0
        self._wake: asyncio.TimerHandle | None = None
        self._refusal: Callable[[], Exception] | None = None
        self.num_waiting = 0
        """Requests without a slot."""

    def take_ticket(self) -> int:
        """A place in the order of arrival."""
        self._next_ticket += 1
        return self._next_ticket

    def hold(self) -> None:
        """Grant nothing until `release_hold`: engines are paused."""
        self.is_held = True

    def release_hold(self) -> None:
        """Grant again."""
        self.is_held = False
        self.pump()

    def try_acquire(
        self, key: str | None, avoid: Lane | None = None, barred: frozenset[Lane] = _NONE
    ) -> Lane | None:
        """A slot at once, or None when somebody waits already or no lane has room."""
        if self.is_held or self._waiters:
            return None
        lane = self._home(key, barred)
        if lane is not None:
            lane = lane if not lane.bound and lane.has_room(time.monotonic()) else None
        else:
            lane = self._choose(avoid, barred, time.monotonic())
        if lane is not None:
            lane.move(1)
        return lane

    async def acquire(
        self, key: str | None, ticket: int, avoid: Lane | None = None, barred: frozenset[Lane] = _NONE
    ) -> Lane:
        """A slot, when its turn comes. Cancellation gives back a slot that was granted meanwhile.

        Raises:
            Exception: what `refuse` has said.
        """
        if self._refusal is not None:
            raise self._refusal()
        future: asyncio.Future[Lane] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(future=future, ticket=ticket, key=key, avoid=avoid, barred=barred)
        home = self._home(key, barred)
        _insert(self._waiters if home is None else home.bound, waiter)
        self.num_waiting += 1
        self.pump()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())
            raise
        finally:
            self.num_waiting -= 1

    def release(self, lane: Lane) -> None:
        """A slot comes back, and goes on to the oldest waiter."""
        lane.move(-1)
        assert lane.in_flight >= 0, "a slot was returned twice"
        self.pump()

    def lane_of(self, url: str) -> Lane | None:
        """The lane to this address; None behind a router, or once it has left."""
        return next((lane for lane in self.lanes if lane.url == url), None)

    def add(self, lane: Lane) -> None:
        """A lane joins."""
        self.lanes.append(lane)
        self.pump()

    def remove(self, lane: Lane) -> None:
        """A lane without requests is forgotten."""
        assert not lane.in_flight, "a lane that leaves is empty"
        self.lanes.remove(lane)
        self.rebind(lane)

    def rebind(self, lane: Lane) -> None:
        """The lane cannot be used: those who wait for it may go anywhere."""
        bound, lane.bound = lane.bound, deque()
        for waiter in bound:
            _insert(self._waiters, waiter)
        self.pump()

    def refuse(self, make_error: Callable[[], Exception] | None) -> None:
        """No engine can be used: all waiters, and all that come, get an error; None ends that."""
        self._refusal = make_error
        if make_error is None:
            return
        for queue in (self._waiters, *(lane.bound for lane in self.lanes)):
            for waiter in queue:
                if not waiter.future.done():
                    waiter.future.set_exception(make_error())
            queue.clear()

    def pump(self) -> None:
        """Grant all that can be granted."""
        if self.is_held:
            return
        now = time.monotonic()
        for lane in self.lanes:
            while lane.bound and lane.has_room(now):
                self._grant(lane.bound.popleft(), lane)
        passed: list[_Waiter] = []
        while self._waiters:
            waiter = self._waiters.popleft()
            if waiter.future.done():
                continue
            lane_or_none = self._choose(waiter.avoid, waiter.barred, now)
            if lane_or_none is not None:
                self._grant(waiter, lane_or_none)
                continue
            passed.append(waiter)
            if not any(lane.has_room(now) for lane in self.lanes):
                break
        self._waiters.extendleft(reversed(passed))
        self._wake_later(now)

    def others(self, barred: frozenset[Lane]) -> list[Lane]:
        """Lanes that can be used besides these."""
        return [lane for lane in self.lanes if lane.is_usable and lane not in barred]

    def are_others_away(self, barred: frozenset[Lane]) -> bool:
        """Whether there are lanes besides these, none of which can be used at present."""
        rest = [lane for lane in self.lanes if lane not in barred and not lane.is_leaving]
        return bool(rest) and not any(lane.is_usable for lane in rest)

    def _grant(self, waiter: _Waiter, lane: Lane) -> None:
        if not waiter.future.done():
            lane.move(1)
            waiter.future.set_result(lane)

    def _home(self, key: str | None, barred: frozenset[Lane]) -> Lane | None:
        """The lane of a routing key: rendezvous hashing, so an outage moves only that engine's keys."""
        if self._balance is not Balance.STICKY or key is None:
            return None
        usable = self.others(barred) or self.others(_NONE)
        return max(usable, key=lambda lane: _score(key, lane.url), default=None)

    def _choose(self, avoid: Lane | None, barred: frozenset[Lane], now: float) -> Lane | None:
        free = [lane for lane in self.lanes if lane.has_room(now)]
        if barred and self.others(barred):
            free = [lane for lane in free if lane not in barred]
        if avoid is not None and len(free) > 1:
            free = [lane for lane in free if lane is not avoid]
        if len(free) < 2:
            return free[0] if free else None
        self._turn += 1
        if self._balance is Balance.ROUND_ROBIN:
            return free[self._turn % len(free)]
        offset = self._turn % len(free)  # ties go round
        return min(free[offset:] + free[:offset], key=lambda lane: lane.in_flight / lane.window.capacity)

    def _wake_later(self, now: float) -> None:
        """Lanes that rest after an overload are tried again when their rest is over."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        rests = [lane.window.not_before for lane in self.lanes if lane.window.not_before > now]
        if rests and self.num_waiting:
            self._wake = asyncio.get_running_loop().call_later(min(rests) - now, self.pump)

    def close(self) -> None:
        """No timer is left behind."""
        if self._wake is not None:
            self._wake.cancel()


def _score(key: str, url: str) -> int:
    return zlib.crc32(f"{key}\0{url}".encode())


def _insert(queue: deque[_Waiter], waiter: _Waiter) -> None:
    """In the order of tickets; a retry is older than almost all, so it goes in near the front."""
    if not queue or queue[-1].ticket < waiter.ticket:
        queue.append(waiter)
        return
    for position, other in enumerate(queue):
        if other.ticket > waiter.ticket:
            queue.insert(position, waiter)
            return
    queue.append(waiter)
