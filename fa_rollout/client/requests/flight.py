"""Requests in the air: their deadlines and their aborts.

Who waits for whom: the sender waits for the answer alone; a timer and the aborting tasks end that wait
through the flight's scope. Invariants: an attempt that may still run at an engine is aborted there, by its
own id, before a retry is sent; time in which engines stand paused does not count.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from itertools import islice

from fa_rollout.client.base.background import Background
from fa_rollout.client.base.clock import ActiveClock, Timer
from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.client.fleet.dispatch import Lane
from fa_rollout.client.fleet.fleet import Fleet

_LOG = logging.getLogger(__name__)
_RESEND_S = 1.0
_PAUSE_POLL_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """One attempt that was sent to one engine."""

    rid: str
    wire_id: str
    lane: Lane
    started_s: float = field(default_factory=time.monotonic)
    started_slot_s: float = 0.0
    """Of its lane, when it started."""
    started_active_s: float = 0.0
    """Of the clock that pauses with the engines."""
    scope: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    timer: Timer | None = None
    has_landed: bool = False
    landing: asyncio.Event | None = None
    """Made for those who wait for the landing; most flights have none."""
    is_expired: bool = False
    """Its deadline has passed: an answer without tokens counts as none."""
    is_aborting: bool = False
    """Its caller wants it ended."""

    async def landed(self, limit_s: float) -> None:
        """Until it lands, at most so long."""
        if self.has_landed:
            return
        self.landing = self.landing or asyncio.Event()
        try:
            async with asyncio.timeout(limit_s):
                await self.landing.wait()
        except TimeoutError:
            return


class Flights:
    """All flights of a pool."""

    def __init__(
        self, fleet: Fleet, clock: ActiveClock, background: Background, policy: FailurePolicy
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._background = background
        self._policy = policy
        self._aloft: dict[str, Flight] = {}
        self.num_orphans_aborted = 0
        """Attempts that ended without an answer and were aborted at their engine."""
        self.num_aborts_undelivered = 0

    def launch(self, flight: Flight, deadline: float) -> None:
        """Begin to watch an attempt; `deadline` on the active clock."""
        self._aloft[flight.wire_id] = flight
        flight.timer = self._clock.timer(deadline, lambda: self._background.spawn(self._expire(flight)))

    def land(self, flight: Flight, *, may_run: bool) -> None:
        """The attempt is over here; one that may still run at the engine is aborted there."""
        flight.has_landed = True
        del self._aloft[flight.wire_id]
        if flight.timer is not None:
            flight.timer.cancel()
            flight.timer = None  # the timer refers to the flight: a cycle would be left to the collector
        if flight.landing is not None:
            flight.landing.set()
        if may_run and not flight.is_expired and not flight.is_aborting:
            self.num_orphans_aborted += 1
            self._background.spawn(self._send_abort(flight))

    def abort(self, flight: Flight) -> None:
        """End an attempt because its caller wants it ended; its answer comes the normal way."""
        if not flight.is_aborting:
            flight.is_aborting = True
            self._background.spawn(self._abort_until_landed(flight))

    def oldest_few(self, count: int) -> list[Flight]:
        """Those that have been in the air longest, the oldest first."""
        return list(islice(self._aloft.values(), count))

    async def _expire(self, flight: Flight) -> None:
        """The deadline passed: see whether somebody paused the engine, else abort there and give up."""
        await self._sit_out_foreign_pause(flight)
        if flight.has_landed or flight.is_aborting:
            return
        flight.is_expired = True
        self.num_orphans_aborted += 1
        _LOG.warning(
            "event=request_expired rid=%s wire_id=%s age_s=%.1f endpoint=%s",
            flight.rid,
            flight.wire_id,
            time.monotonic() - flight.started_s,
            flight.lane.url,
        )
        await self._abort_until_landed(flight)

    async def _abort_until_landed(self, flight: Flight) -> None:
        """Send the abort, again while it may be lost (before the engine knows the id), then cut the wire."""
        give_up = self._clock.now() + self._policy.abort_grace_s
        while not flight.has_landed:
            await self._send_abort(flight)
            rest_s = give_up - self._clock.now()
            if rest_s <= 0 and not self._clock.is_stopped:
                break
            await flight.landed(min(_RESEND_S, rest_s) if rest_s > 0 else _RESEND_S)
        if not flight.has_landed:
            end_scope(flight.scope)

    async def _send_abort(self, flight: Flight) -> None:
        self.num_aborts_undelivered += await self._fleet.abort(flight.wire_id, flight.lane.url)

    async def _sit_out_foreign_pause(self, flight: Flight) -> None:
        """While the engine says that it is paused, silence is no failure; then there is a fresh deadline."""
        until = time.monotonic() + self._policy.foreign_pause_s
        while not flight.has_landed and await self._fleet.is_paused(flight.lane.url):
            if time.monotonic() >= until:
                return
            await flight.landed(_PAUSE_POLL_S)
            if not await self._fleet.is_paused(flight.lane.url):
                await flight.landed(self._policy.request_timeout_s)


def end_scope(scope: asyncio.Timeout) -> None:
    """End a wait now, unless it is ending already."""
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())
