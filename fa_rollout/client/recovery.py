"""Outages: an open circuit is probed until its engine works again; an outage of all has a deadline."""

import asyncio
import logging
from dataclasses import dataclass

from fa_rollout.client.background import Background
from fa_rollout.client.clock import ActiveClock, Timer
from fa_rollout.client.dispatch import Dispatcher, Lane
from fa_rollout.client.errors import ControlFailed, EngineUnavailable
from fa_rollout.client.fleet import Fleet
from fa_rollout.client.policy import FailurePolicy

_LOG = logging.getLogger(__name__)
_SLOWEST = 10.0
_HEALTH_TIMEOUT_S = 30.0
"""SGLang's /health runs a token and gives up after 20 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What was last loaded on every engine; an engine that comes back must have it too."""

    path: str
    label: str


class Recovery:
    """Brings lanes back."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        clock: ActiveClock,
        background: Background,
        policy: FailurePolicy,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._clock = clock
        self._background = background
        self._policy = policy
        self._outage: Timer | None = None
        self.weights: Weights | None = None

    def opened(self, lane: Lane) -> None:
        """A circuit has opened: move its waiters, probe it, and set a deadline when it was the last."""
        _LOG.warning(
            "event=circuit_open endpoint=%s failures=%d last_error=%s",
            lane.url,
            lane.circuit.failures_in_row,
            lane.circuit.last_error,
        )
        self._dispatcher.rebind(lane)
        self._background.spawn(self._probe_until_well(lane))
        if all(other.circuit.is_open for other in self._dispatcher.lanes) and self._outage is None:
            deadline = self._clock.now() + self._policy.unavailable_timeout_s
            self._outage = self._clock.timer(deadline, self._give_up)

    def close(self) -> None:
        """No timer is left behind."""
        if self._outage is not None:
            self._outage.cancel()

    def _give_up(self) -> None:
        lasts = "; ".join(f"{lane.url}: {lane.circuit.last_error}" for lane in self._dispatcher.lanes)
        self._dispatcher.refuse(
            EngineUnavailable(
                f"one engine must work, found none for {self._policy.unavailable_timeout_s:g} s; {lasts}"
            )
        )

    async def _probe_until_well(self, lane: Lane) -> None:
        interval_s = self._policy.probe_interval_s
        while True:
            await asyncio.sleep(interval_s)
            interval_s = min(interval_s * 1.5, _SLOWEST * self._policy.probe_interval_s)
            # A health check of a paused SGLang blocks, and marks it as unhealthy.
            if not self._clock.is_stopped and await self._is_well(lane):
                break
        lane.circuit.close()
        lane.window.restart()
        if self._outage is not None:
            self._outage.cancel()
            self._outage = None
        self._dispatcher.refuse(None)
        _LOG.warning("event=circuit_closed endpoint=%s", lane.url)
        self._dispatcher.pump()

    async def _is_well(self, lane: Lane) -> bool:
        front = self._fleet.fronts[lane.url]
        if await front.status("/health", _HEALTH_TIMEOUT_S) != 200:
            return False
        if not await self._fleet.router_has_healthy_workers():
            return False
        try:
            await self._renew_weights()
        except ControlFailed as error:
            lane.circuit.last_error = str(error)
            return False
        return True

    async def _renew_weights(self) -> None:
        """An engine that was started anew has its first weights: no request reaches it before the current ones."""
        if self.weights is None:
            return
        for engine in await self._fleet.refresh():
            found = await self._fleet.version_of(engine)
            if found != self.weights.label:
                _LOG.warning(
                    "event=weights_renewed endpoint=%s found=%s label=%s",
                    engine.url,
                    found,
                    self.weights.label,
                )
                await self._fleet.update_one(engine, self.weights.path, self.weights.label, flush_cache=True)
