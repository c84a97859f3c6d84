"""What a pool counts, and the frozen picture of it."""

import math
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

import numpy as np

from fa_rollout.client.base.circuit import CircuitState
from fa_rollout.client.base.clock import ActiveClock
from fa_rollout.client.base.errors import FailureClass
from fa_rollout.client.fleet.dispatch import Lane, LaneDispatcher
from fa_rollout.client.requests.flight import Flights
from fa_rollout.client.wire.completion import Completion

_REMEMBERED = 1024
_SHARES = (50, 90, 99)
_NUM_SLOWEST = 5
_PACES_PER_FACTOR = 5
"""Loads that differ by a fifth in their logarithm are kept apart."""
_PACED_TOKENS = 1e6
"""After this many, what was seen before counts half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStatistics:
    """One engine, or the router."""

    url: str
    num_in_flight: int
    num_allowed: int
    """Requests it may hold now; less than `capacity` after an overload or an outage."""
    capacity: int
    num_done: int
    num_aborted: int
    """Of those done, the ones that ended as aborts."""
    num_tokens: int
    failures: dict[FailureClass, int]
    circuit: CircuitState
    last_error: str
    failing_s: float
    """For so long it has answered nothing but failures; 0: there was one at most since a true answer."""
    latency_s: dict[str, float]
    """p50, p90, p99 of the latest answers; empty before the first."""
    version: str | None
    """Label of the newest token that it answered with."""
    paces: tuple[tuple[float, float, float], ...] = ()
    """By load: tokens, load times tokens, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightAge:
    """A request that waits for its answer."""

    rid: str
    url: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """A pool at one moment."""

    lanes: tuple[LaneStatistics, ...]
    num_in_flight: int
    num_waiting: int
    """Calls that wait for a slot."""
    num_orphans_aborted: int
    """Attempts that ended without an answer and were aborted at their engine."""
    num_aborts_undelivered: int
    is_paused: bool
    paused_s: float
    """Time that this pool's pauses have taken in all."""
    oldest_age_s: float
    slowest: tuple[FlightAge, ...]
    """A few that have been in the air longest, the oldest first."""


@dataclass(slots=True)
class _Page:
    num_done: int = 0
    num_aborted: int = 0
    num_tokens: int = 0
    failures: Counter[FailureClass] = field(default_factory=Counter)
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    last_error: str = ""
    failing_since_s: float | None = None
    failed_s: float = 0.0
    version: str | None = None
    paces: dict[int, list[float]] = field(default_factory=dict)
    """By the logarithm of the load: tokens, load times tokens, seconds."""


class RequestBooks:
    """Counters per engine."""

    def __init__(self) -> None:
        self._pages: defaultdict[str, _Page] = defaultdict(_Page)

    def finish(self, url: str, started_s: float, completion: Completion) -> None:
        """An answer was accepted."""
        page = self._pages[url]
        page.num_done += 1
        page.failing_since_s = None
        page.num_aborted += completion.finish == "abort"
        page.num_tokens += len(completion.output_ids)
        if completion.versions:
            page.version = completion.versions[-1][0]
        page.latencies_s.append(time.monotonic() - started_s)

    def paced(self, url: str, num_tokens: int, beside: float, spent_s: float) -> None:
        """An answer took this long beside so many others; old ones fade."""
        if not num_tokens:
            return
        paces = self._pages[url].paces
        place = round(_PACES_PER_FACTOR * math.log(max(1.0, beside)))
        pace = paces.setdefault(place, [0.0, 0.0, 0.0])
        for index, value in enumerate((num_tokens, beside * num_tokens, spent_s)):
            pace[index] += value
        if sum(pace[0] for pace in paces.values()) > _PACED_TOKENS:
            for pace in paces.values():
                pace[:] = [value / 2 for value in pace]

    def fail(self, url: str, failure: FailureClass, error: str) -> None:
        """An attempt failed."""
        page = self._pages[url]
        page.failures[failure] += 1
        page.last_error = error
        if failure is not FailureClass.PERMANENT:
            page.failed_s = time.monotonic()
            page.failing_since_s = page.failing_since_s or page.failed_s

    def lane(self, lane: Lane) -> LaneStatistics:
        """The picture of one lane."""
        page = self._pages[lane.url]
        return LaneStatistics(
            url=lane.url,
            num_in_flight=lane.in_flight,
            num_allowed=lane.window.allowed,
            capacity=lane.window.capacity,
            num_done=page.num_done,
            num_aborted=page.num_aborted,
            num_tokens=page.num_tokens,
            failures=dict(page.failures),
            circuit=lane.circuit.state,
            last_error=page.last_error,
            failing_s=0.0 if page.failing_since_s is None else page.failed_s - page.failing_since_s,
            latency_s=_percentiles(page.latencies_s),
            version=page.version,
            paces=tuple((pace[0], pace[1], pace[2]) for pace in page.paces.values()),
        )


def _percentiles(latencies_s: deque[float]) -> dict[str, float]:
    if not latencies_s:
        return {}
    values = np.percentile(list(latencies_s), _SHARES)
    return {f"p{share}": float(value) for share, value in zip(_SHARES, values, strict=True)}


def take_statistics(
    books: RequestBooks, dispatcher: LaneDispatcher, flights: Flights, clock: ActiveClock
) -> PoolStatistics:
    """A pool's picture from its parts."""
    now_s = time.monotonic()
    slowest = tuple(
        FlightAge(rid=flight.rid, url=flight.lane.url, age_s=now_s - flight.started_s)
        for flight in flights.oldest_few(_NUM_SLOWEST)
    )
    return PoolStatistics(
        lanes=tuple(books.lane(lane) for lane in dispatcher.lanes),
        num_in_flight=sum(lane.in_flight for lane in dispatcher.lanes),
        num_waiting=dispatcher.num_waiting,
        num_orphans_aborted=flights.num_orphans_aborted,
        num_aborts_undelivered=flights.num_aborts_undelivered,
        is_paused=clock.is_stopped,
        paused_s=clock.lost_s,
        oldest_age_s=slowest[0].age_s if slowest else 0.0,
        slowest=slowest,
    )
