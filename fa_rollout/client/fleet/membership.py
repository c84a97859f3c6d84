"""Engines that join a pool while it works, and engines that leave it.

| who | waits for | at most |
|---|---|---|
| an engine that joins | its own start, the current weights, the end of an update | `start_timeout_s` each |
| an engine that leaves | the requests that it has | `drain_s`, then they are aborted and go on elsewhere |

Invariant: an engine gets its first request when it holds the weights that all others hold; it is forgotten
when no request of ours is there any more. Behind a router the same, but what a worker that leaves still has
is the router's to finish.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from fa_rollout.client.base.descriptors import allowed_connections
from fa_rollout.client.base.errors import ControlFailed, ControlRefused
from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.client.engine import control
from fa_rollout.client.engine.endpoints import Engine
from fa_rollout.client.engine.probe import patiently, probe
from fa_rollout.client.engine.standing import EngineInfo, Status
from fa_rollout.client.fleet.dispatch import Lane, LaneDispatcher
from fa_rollout.client.fleet.fleet import Fleet
from fa_rollout.client.fleet.recovery import Recovery
from fa_rollout.client.wire.address import engine_url
from fa_rollout.client.wire.request import WireIds

_LOG = logging.getLogger(__name__)
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Who belongs to a pool."""

    fleet: Fleet
    dispatcher: LaneDispatcher
    recovery: Recovery
    policy: FailurePolicy
    ids: WireIds
    max_per_engine: int
    """Requests at once."""
    abort_lane: Callable[[Lane], None]
    """Aborts the calls that are in the air on a lane."""
    ends_pauses: bool
    """An engine that stands paused for long goes on."""

    async def join(self, address: str, label: str) -> None:
        """Bring an engine in; harmless for one that is in. `label`: of the weights that all others hold.

        Raises:
            AddressError: the address cannot be read.
            EngineUnavailable: it does not come up.
            ControlFailed: it is not like the others, or cannot be given the current weights.
        """
        url = engine_url(address)
        if self._is_in(url):
            return
        engine = self.fleet.known(url)
        limit_s = self.policy.start_timeout_s
        info = await patiently(
            lambda: probe(
                engine,
                self.ids.make("probe"),
                self.policy.control_timeout_s,
                ends_pauses=self.ends_pauses,
            ),
            time.monotonic() + limit_s,
            url,
        )
        self._check(info)
        await self._made_current(engine, label, time.monotonic() + limit_s)
        if self._is_in(url):
            return  # somebody else's wish for it came true first
        if self.fleet.router is not None:
            await self.fleet.enlist(engine)
        else:
            self._admit(engine)
        engine.standing.info = info
        self.resize_lanes()
        _LOG.info("event=engine_joined endpoint=%s", url)

    async def leave(self, address: str, drain_s: float) -> None:
        """Take an engine out; harmless for one that is not in.

        Raises:
            ControlFailed: it is the last one.
        """
        url = engine_url(address)
        if self.fleet.router is not None:
            await self.fleet.strike_off(url)
        else:
            await self._drain(url, drain_s)
        self.recovery.left(url)
        self.resize_lanes()
        _LOG.info("event=engine_left endpoint=%s", url)

    def resize_lanes(self) -> None:
        """Behind a router one lane leads to all engines; open files limit all lanes together."""
        lanes, num_engines = self.dispatcher.lanes, max(1, len(self.fleet.infos))
        per_lane = self.max_per_engine * (1 if self.fleet.router is None else num_engines)
        allowed = allowed_connections(per_lane * len(lanes)) // len(lanes)
        for lane in lanes:
            lane.window.resize(max(1, allowed))
        self.dispatcher.pump()

    def _is_in(self, url: str) -> bool:
        return url in {engine.url for engine in self.fleet.engines}

    def _admit(self, engine: Engine) -> None:
        self.fleet.admit(engine)
        self.dispatcher.add(Lane.to(engine.url, self.max_per_engine, self.policy))
        self.recovery.joined()

    async def _drain(self, url: str, drain_s: float) -> None:
        lane = self.dispatcher.lane_of(url)
        if lane is None or lane.is_leaving:
            return
        if all(other is lane or other.is_leaving for other in self.dispatcher.lanes):
            raise ControlRefused(f"a run must keep one engine, found {url} to be its last: add another first")
        lane.is_leaving = True
        self.dispatcher.rebind(lane)
        await _emptied(lane, drain_s)
        while lane.in_flight:
            self.abort_lane(lane)
            await _emptied(lane, self.policy.abort_grace_s)
        self.dispatcher.remove(lane)

    def _check(self, info: EngineInfo) -> None:
        if not info.has_spans and all(other.has_spans for other in self.fleet.infos):
            raise ControlRefused(f"{info.url} must tell version spans as the other engines do")
        for name in ("vocab_size", "context_length"):
            known = [number for other in self.fleet.infos if (number := getattr(other, name)) is not None]
            found, wanted = getattr(info, name), min(known, default=0)
            if found is not None and found < wanted:
                raise ControlRefused(f"{info.url} must have a {name} of {wanted} or more, found {found}")

    async def _made_current(self, engine: Engine, label: str, until: float) -> None:
        """The engine has the current weights, and no update goes on, when this returns; see `is_ready`."""
        weights = self.recovery.weights.wanted
        if weights is None and await control.version_of(engine) != label:
            raise ControlRefused(
                f"{engine.url} must hold version {label!r} to join: the trainer pushes weights by itself, "
                "and nobody here can give them to it"
            )
        if weights is not None and weights.is_streamed:
            engine.standing.status = Status.JOINS  # the next stream brings it the weights
        try:
            while not await self.recovery.is_ready(engine) or self.recovery.must_wait:
                if time.monotonic() > until:
                    raise ControlFailed(
                        f"{engine.url} must take the current weights in time, and did not; where they come "
                        "without files (trainer.publish), that is at the next hook.update_weights()"
                    )
                await asyncio.sleep(self.policy.probe_interval_s)
        finally:
            engine.standing.status = Status.SERVES


async def _emptied(lane: Lane, limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while lane.in_flight and time.monotonic() < until:  # noqa: ASYNC110 - rare, and lanes stay plain
        await asyncio.sleep(_POLL_S)
