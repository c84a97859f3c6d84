"""Engines that join and leave a running pool.

| who | waits for | at most |
|---|---|---|
| a joining engine | its start, the current weights, the end of an update | `start_timeout_s` each |
| a leaving engine | its running requests | `drain_s`, then they are aborted and continue elsewhere |

Invariant: an engine gets its first request only after it has the same weights as all others, and is removed
only when it has none of our requests. Behind a router, the router finishes a leaving worker's requests.
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
    """The engines of a pool: joining and leaving."""

    fleet: Fleet
    dispatcher: LaneDispatcher
    recovery: Recovery
    policy: FailurePolicy
    ids: WireIds
    max_per_engine: int
    """Requests at once."""
    abort_lane: Callable[[Lane], None]
    """Aborts the running calls of a lane."""
    ends_pauses: bool
    """Continue an engine that has been paused for long."""

    async def join(self, address: str, label: str) -> None:
        """Add an engine; no effect if it is a member. `label`: version label of the others' weights.

        Raises:
            AddressError: the address is malformed.
            EngineUnavailable: the engine does not come up.
            ControlFailed: it differs from the others, or cannot get the current weights.
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
            return  # a concurrent request has added it
        if self.fleet.router is not None:
            await self.fleet.enlist(engine)
        else:
            self._admit(engine)
        engine.standing.info = info
        self.resize_lanes()
        _LOG.info("event=engine_joined endpoint=%s", url)

    async def leave(self, address: str, drain_s: float) -> None:
        """Remove an engine; no effect if it is not a member.

        Raises:
            ControlFailed: it is the last engine.
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
        """Set each lane's size. Behind a router, one lane serves all engines; open files limit the sum."""
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
            raise ControlRefused(f"{url} is the last engine of the run: add another before you remove it")
        lane.is_leaving = True
        self.dispatcher.rebind(lane)
        await _emptied(lane, drain_s)
        while lane.in_flight:
            self.abort_lane(lane)
            await _emptied(lane, self.policy.abort_grace_s)
        self.dispatcher.remove(lane)

    def _check(self, info: EngineInfo) -> None:
        if not info.has_spans and all(other.has_spans for other in self.fleet.infos):
            raise ControlRefused(f"{info.url} must report version spans, as the other engines do")
        for name in ("vocab_size", "context_length"):
            known = [number for other in self.fleet.infos if (number := getattr(other, name)) is not None]
            found, wanted = getattr(info, name), min(known, default=0)
            if found is not None and found < wanted:
                raise ControlRefused(f"{info.url} must have a {name} of {wanted} or more, found {found}")

    async def _made_current(self, engine: Engine, label: str, until: float) -> None:
        """Wait until the engine has the current weights and no update is running; see `is_ready`."""
        weights = self.recovery.weights.wanted
        if weights is None and await control.version_of(engine) != label:
            raise ControlRefused(
                f"{engine.url} must have version {label!r} to join: the trainer pushes weights itself, so "
                "fa_rollout cannot load them into it"
            )
        if weights is not None and weights.is_streamed:
            engine.standing.status = Status.JOINS  # the next stream updates it
        try:
            while not await self.recovery.is_ready(engine) or self.recovery.must_wait:
                if time.monotonic() > until:
                    raise ControlFailed(
                        f"{engine.url} did not load the current weights in time; if weights are sent without "
                        "files (trainer.publish), it gets them at the next hook.update_weights()"
                    )
                await asyncio.sleep(self.policy.probe_interval_s)
        finally:
            engine.standing.status = Status.SERVES


async def _emptied(lane: Lane, limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while lane.in_flight and time.monotonic() < until:  # noqa: ASYNC110 - rare, and lanes stay plain
        await asyncio.sleep(_POLL_S)
