"""What a pool counts, and the frozen picture of it."""

import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

import numpy as np

from fa_rollout.client.circuit import CircuitState
from fa_rollout.client.clock import ActiveClock
from fa_rollout.client.completion import Completion
from fa_rollout.client.dispatch import Dispatcher, Lane
from fa_rollout.client.errors import FailureClass
from fa_rollout.client.flight import Flights

_REMEMBERED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStatistics:
    """One engine, or the router."""

    url: str
    num_in_flight: int
    num_allowed: int
    """Requests it may hold now; less than configured after an overload or an outage."""
    num_done: int
    num_aborted: int
    """Of those done, the ones that ended as aborts."""
    num_tokens: int
    failures: dict[FailureClass, int]
    circuit: CircuitState
    last_error: str
    latency_s: dict[str, float]
    """p50, p90, p99 of the latest answers; empty before the first."""


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
    oldest_rid: str | None
    oldest_age_s: float
    oldest_url: str | None


@dataclass(slots=True)
class _Page:
    num_done: int = 0
    num_aborted: int = 0
    num_tokens: int = 0
    failures: Counter[FailureClass] = field(default_factory=Counter)
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    last_error: str = ""


class Books:
    """Counters per engine."""

    def __init__(self) -> None:
        self._pages: defaultdict[str, _Page] = defaultdict(_Page)

    def finish(self, url: str, started_s: float, completion: Completion) -> None:
        """An answer was accepted."""
        page = self._pages[url]
        page.num_done += 1
        page.num_aborted += completion.finish == "abort"
        page.num_tokens += len(completion.output_ids)
        page.latencies_s.append(time.monotonic() - started_s)

    def fail(self, url: str, failure: FailureClass, error: str) -> None:
        """An attempt failed."""
        page = self._pages[url]
        page.failures[failure] += 1
        page.last_error = error

    def lane(self, lane: Lane) -> LaneStatistics:
        """The picture of one lane."""
        page = self._pages[lane.url]
        shares = (50, 90, 99) if page.latencies_s else ()
        return LaneStatistics(
            url=lane.url,
            num_in_flight=lane.in_flight,
            num_allowed=lane.window.allowed,
            num_done=page.num_done,
            num_aborted=page.num_aborted,
            num_tokens=page.num_tokens,
            failures=dict(page.failures),
            circuit=lane.circuit.state,
            last_error=page.last_error,
            latency_s={f"p{s}": float(np.percentile(list(page.latencies_s), s)) for s in shares},
        )


def take_statistics(
    books: Books, dispatcher: Dispatcher, flights: Flights, clock: ActiveClock
) -> PoolStatistics:
    """A pool's picture from its parts."""
    oldest = flights.oldest()
    return PoolStatistics(
        lanes=tuple(books.lane(lane) for lane in dispatcher.lanes),
        num_in_flight=sum(lane.in_flight for lane in dispatcher.lanes),
        num_waiting=dispatcher.num_waiting,
        num_orphans_aborted=flights.num_orphans_aborted,
        num_aborts_undelivered=flights.num_aborts_undelivered,
        is_paused=clock.is_stopped,
        paused_s=clock.lost_s,
        oldest_rid=oldest.rid if oldest else None,
        oldest_age_s=time.monotonic() - oldest.started_s if oldest else 0.0,
        oldest_url=oldest.lane.url if oldest else None,
    )
