"""Reports once a second that the loop is alive, how long it was blocked, and the generator's figures.

Invariant: figures are read from their owners; only time is measured here.
"""

import asyncio
from collections.abc import Callable

import msgspec

from fa_rollout.client.base.circuit import CircuitState
from fa_rollout.client.requests.statistics import PoolStatistics
from fa_rollout.user_code.failure import in_one_line
from trainer_hook.messages import EngineFigures, Lingering, Message, Pace, Pulse, Warned

BEAT_S = 0.05
PULSE_S = 1.0


def engine_figures(pool: PoolStatistics) -> list[EngineFigures]:
    """The lanes of a pool, as a message for the hub."""
    return [
        EngineFigures(
            url=lane.url,
            in_flight=lane.num_in_flight,
            allowed=lane.num_allowed,
            capacity=lane.capacity,
            paces=[Pace(tokens=t, beside=n, spent_s=s) for t, n, s in lane.paces],
            is_out=lane.circuit is CircuitState.OPEN,
            num_done=lane.num_done,
            num_aborted=lane.num_aborted,
            num_tokens=lane.num_tokens,
            failures={failure.value: count for failure, count in lane.failures.items()},
            failing_s=lane.failing_s,
            last_error=lane.last_error,
            latency_s=lane.latency_s,
            version=lane.version,
        )
        for lane in pool.lanes
    ]


def slowest_requests(pool: PoolStatistics) -> list[Lingering]:
    """The requests that have waited longest for their answers."""
    return [Lingering(name=flight.rid, age_s=flight.age_s, where=flight.url) for flight in pool.slowest]


class Heart:
    """A heartbeat on the event loop; a late beat means that the loop was blocked."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self.figures: Callable[[], Pulse] = Pulse
        """All figures except rates; zero until the generator is open."""
        self._has_warned = False

    def _figures(self, last: Pulse) -> Pulse:
        """The current figures; on an error the previous ones, with one warning."""
        try:
            return self.figures()
        except Exception as error:  # figures are informational: the run continues after any error
            if not self._has_warned:
                self._has_warned = True
                self._send(Warned(text=f"the generator's figures are not updated: {in_one_line(error)}"))
            return last

    async def run(self) -> None:
        """Beat until cancelled."""
        loop = asyncio.get_running_loop()
        told_s = last_s = loop.time()
        gap_s, num_tokens = 0.0, 0
        figures = Pulse()
        while True:
            await asyncio.sleep(BEAT_S)
            now_s = loop.time()
            gap_s = max(gap_s, now_s - last_s - BEAT_S)
            last_s = now_s
            if now_s - told_s < PULSE_S:
                continue
            figures = self._figures(figures)
            tokens_per_s = (figures.tokens - num_tokens) / (now_s - told_s)
            self._send(
                msgspec.structs.replace(figures, tokens_per_s=tokens_per_s, loop_gap_ms=1000.0 * gap_s)
            )
            told_s, gap_s, num_tokens = now_s, 0.0, figures.tokens
