"""Outages: an engine that was taken out is probed until it works again; an outage of all has a deadline.

Invariant: an engine gets requests again only when it is healthy and has the weights that were loaded last.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from fa_rollout.client.base.background import Background
from fa_rollout.client.base.clock import ActiveClock, Timer
from fa_rollout.client.base.errors import ControlFailed, ControlRefused, EngineUnavailable
from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.client.engine import control
from fa_rollout.client.engine.endpoints import Engine
from fa_rollout.client.fleet.dispatch import Dispatcher, Lane
from fa_rollout.client.fleet.fleet import Fleet

_LOG = logging.getLogger(__name__)
_SLOWEST = 10.0
_COLD = 8
"""Requests at first for an engine that was out."""
_HEALTH_TIMEOUT_S = 30.0
"""SGLang's /health runs a token and gives up after 20 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What every engine holds; one that comes back must have it too."""

    path: str | None = None
    """None: every engine has it from its own start, and lacks the label alone."""
    label: str
    is_streamed: bool = False
    """No file holds it: an engine that lacks it must wait for the next update."""
    is_others: bool = False
    """Somebody else gives it to engines: one that lacks it must wait until it has it."""


class WeightsMissing(ControlFailed):
    """An engine that works, and lacks weights that no file holds."""


class Recovery:
    """Takes engines out and brings them back."""

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
        self._lanes = {lane.url: lane for lane in dispatcher.lanes}
        self._clock = clock
        self._background = background
        self._policy = policy
        self._outage: Timer | None = None
        self._must_continue: set[str] = set()
        self._without_weights: set[str] = set()
        """Engines that are well, and wait for weights that only the trainer has."""
        self.weights: Weights | None = None
        """None: unknown, or pushed by somebody else, who alone can push it again."""
        self.is_changing = False
        """Somebody else replaces the weights: nothing that an engine tells now is held for or against it."""
        self._is_looking = False
        fleet.on_lost = self.lost

    def opened(self, lane: Lane) -> None:
        """A lane's circuit has opened: its engine is out."""
        _LOG.warning(
            "event=circuit_open endpoint=%s failures=%d last_error=%s",
            lane.url,
            lane.circuit.failures_in_row,
            lane.circuit.last_error,
        )
        self._is_out(lane)

    def exposed(self, lane: Lane) -> None:
        """An engine has answered untruly too often: it is out, and has to prove itself when it is back."""
        is_first = lane.circuit.num_exposed == 1
        _LOG.log(
            logging.ERROR if is_first else logging.INFO,
            "event=engine_untrue endpoint=%s rest_s=%.0f last_error=%s",
            lane.url,
            lane.circuit.rests_until - time.monotonic(),
            lane.circuit.last_error,
        )
        self._is_out(lane)

    def _is_out(self, lane: Lane) -> None:
        self._dispatcher.rebind(lane)
        self._take_out(self._fleet.fronts[lane.url])
        if all(other.circuit.is_open for other in self._lanes.values()) and self._outage is None:
            deadline = self._clock.now() + self._policy.unavailable_timeout_s
            self._outage = self._clock.timer(deadline, self._give_up)

    def lost(self, engine: Engine, error: ControlFailed) -> None:
        """A control call did not reach an engine that others did without."""
        if self._clock.is_stopped:
            self._must_continue.add(engine.url)  # it may have been paused before it went silent
        lane = self._lanes.get(engine.url)
        if lane is None:
            _LOG.warning("event=worker_lost endpoint=%s error=%s", engine.url, error)
            self._take_out(engine)
            if self.weights is not None and self.weights.is_streamed:
                self._background.spawn(self._fleet.set_aside(engine))  # for who knows how long
        elif lane.circuit.open(str(error)):
            self.opened(lane)
        else:
            self._take_out(engine)

    def stranded(self) -> list[Engine]:
        """Engines that lack nothing but weights, when no other is left."""
        engines, lost = [*self._fleet.engines, *self._fleet.aside.values()], self._fleet.lost
        if any(engine.url not in lost for engine in engines):
            return []
        return [engine for engine in engines if engine.url in self._without_weights]

    def has_weights(self, engines: Iterable[Engine]) -> None:
        """These engines took the current weights, whatever they missed before."""
        for engine in engines:
            self._fleet.lost.discard(engine.url)
            self._without_weights.discard(engine.url)
            lane = self._lanes.get(engine.url)
            if lane is not None and lane.circuit.is_open:
                self._reopen(lane)
            self._enlist(engine)

    def _enlist(self, engine: Engine) -> None:
        """A router may send it requests again; it may take until the end of an update that it does."""
        if engine.url in self._fleet.aside:
            self._background.spawn(self._fleet.reenlist(engine))

    def recheck(self) -> None:
        """An answer claimed a version that it should not have: take out engines that were started anew."""
        if self.weights is not None and not self._is_looking and not self.must_wait:
            self._is_looking = True
            self._background.spawn(self._look(self.weights))

    async def _look(self, expected: Weights) -> None:
        try:
            for engine in [e for e in self._fleet.engines if e.url not in self._fleet.lost]:
                found = await control.version_of(engine)
                is_current = self.weights is expected and not self.must_wait
                if is_current and found != expected.label:
                    self.lacks(engine, expected.label, found)
        except ControlFailed as error:
            _LOG.info("event=version_unknown error=%s", error)
        finally:
            self._is_looking = False

    async def changed(self, label: str | None) -> int:
        """See `EnginePool.changed`."""
        self.is_changing = False
        if label is not None:
            self.weights = Weights(label=label, is_others=True)
        told = await self._fleet.versions()
        if self.weights is None:
            return len(told)
        others = {url: found for url, found in told.items() if found != self.weights.label}
        for engine in await self._fleet.everyone():
            if engine.url in others:
                self.lacks(engine, self.weights.label, others[engine.url])
        return len(told) - len(others)

    def lacks(self, engine: Engine, label: str, found: str | None) -> None:
        """An engine tells another label than it should: it is out until it has these weights."""
        self.lost(engine, ControlRefused(f"{engine.url} must tell weight version {label!r}, found {found!r}"))

    def overloaded(self, lane: Lane) -> None:
        """A 503: a router without any worker says the same as an engine with too much to do."""
        is_router = self._fleet.is_router(self._fleet.fronts[lane.url])
        if is_router and lane.is_usable and not self._is_looking:
            self._is_looking = True
            self._background.spawn(self._look_at_router(lane))

    async def _look_at_router(self, lane: Lane) -> None:
        try:
            has_none = not await self._fleet.has_healthy_workers()
            if (
                has_none
                and not self._clock.is_stopped
                and lane.circuit.open("the router has no healthy worker")
            ):
                self.opened(lane)
        finally:
            self._is_looking = False

    def close(self) -> None:
        """No timer is left behind."""
        if self._outage is not None:
            self._outage.cancel()

    def _take_out(self, engine: Engine) -> None:
        if engine.url not in self._fleet.lost:
            self._fleet.lost.add(engine.url)
            self._background.spawn(self._bring_back(engine))

    def _give_up(self) -> None:
        text = str(self.unavailable())
        self._dispatcher.refuse(lambda: EngineUnavailable(text))

    def unavailable(self) -> EngineUnavailable:
        """Patience has ended."""
        lasts = "; ".join(f"{lane.url}: {lane.circuit.last_error}" for lane in self._lanes.values())
        return EngineUnavailable(
            f"one engine must work, found none for {self._policy.unavailable_timeout_s:g} s; {lasts}"
        )

    async def _bring_back(self, engine: Engine) -> None:
        interval_s = self._policy.probe_interval_s
        while True:
            await asyncio.sleep(interval_s)
            interval_s = min(interval_s * 1.5, _SLOWEST * self._policy.probe_interval_s)
            if engine.url not in self._fleet.lost:
                return  # it has left
            lane = self._lanes.get(engine.url)
            if lane is not None and time.monotonic() < lane.circuit.rests_until:
                continue
            if await self.is_ready(engine):
                break
        self._fleet.lost.discard(engine.url)
        is_proven = lane is None or not lane.circuit.num_exposed
        _LOG.log(logging.WARNING if is_proven else logging.INFO, "event=engine_back endpoint=%s", engine.url)
        self._enlist(engine)
        lane = self._lanes.get(engine.url)
        if lane is not None:
            self._reopen(lane)

    async def is_ready(self, engine: Engine) -> bool:
        """Whether it works and holds the current weights, which it is given if it lacks them.

        What follows this must not wait before it acts on it: an update may begin.
        """
        # A health check of a paused SGLang blocks, and marks it as unhealthy. One that is in once the others
        # have emptied their caches would keep what it computed under its old weights.
        return not self.must_wait and await self._is_well(engine) and not self.must_wait

    @property
    def must_wait(self) -> bool:
        """An update goes on: what joins now would miss a part of it."""
        return self._clock.is_stopped or self.is_changing

    def joined(self, lane: Lane) -> None:
        """An engine more."""
        self._lanes[lane.url] = lane
        self._end_outage()

    def left(self, url: str) -> None:
        """An engine less, which nobody brings back."""
        self._lanes.pop(url, None)
        self._fleet.lost.discard(url)
        self._must_continue.discard(url)
        self._without_weights.discard(url)
        self._fleet.aside.pop(url, None)

    def _reopen(self, lane: Lane) -> None:
        lane.circuit.close()
        lane.window.restart(1 if lane.circuit.num_exposed else _COLD)
        self._end_outage()

    def _end_outage(self) -> None:
        if self._outage is not None:
            self._outage.cancel()
            self._outage = None
        self._dispatcher.refuse(None)
        self._dispatcher.pump()

    async def _is_well(self, engine: Engine) -> bool:
        try:
            if engine.url in self._must_continue:
                await engine.call("POST", "/continue_generation", {})
                self._must_continue.discard(engine.url)
            if await engine.status("/health", _HEALTH_TIMEOUT_S) != 200:
                return False
            if self._fleet.is_router(engine):
                return await self._fleet.has_healthy_workers()
            await self._renew_weights(engine)
        except ControlFailed as error:
            _LOG.info("event=engine_still_out endpoint=%s error=%s", engine.url, error)
            if isinstance(error, WeightsMissing):
                self._without_weights.add(engine.url)
            return False
        self._without_weights.discard(engine.url)
        return True

    async def _renew_weights(self, engine: Engine) -> None:
        """An engine that was started anew has its first weights; what it needs may change while it loads."""
        while True:
            weights = self.weights
            found = await control.version_of(engine)
            if weights is not self.weights:
                continue
            if found == control.IN_PIECES or (weights is not None and found != weights.label):
                _check_can_be_given(engine, weights, found)
            if weights is None or found == weights.label:
                return
            _LOG.warning(
                "event=weights_renewed endpoint=%s found=%s label=%s", engine.url, found, weights.label
            )
            await self._give(engine, weights)

    async def _give(self, engine: Engine, weights: Weights) -> None:
        if weights.path is None:
            await control.set_label(engine, weights.label)
        else:
            limit_s = self._policy.update_timeout_s
            files = control.Files(path=weights.path, label=weights.label)
            # A request that began under other weights must not end under the label of these.
            async with control.emptied(engine, self._policy.pause_timeout_s):
                await control.load_weights(
                    engine, files, takes_parts=False, flush_cache=True, limit_s=limit_s
                )


def _check_can_be_given(engine: Engine, weights: Weights | None, found: str | None) -> None:
    """Raise WeightsMissing when nobody here has what this engine lacks."""
    if weights is not None and weights.is_others:
        raise WeightsMissing(
            f"{engine.url} must hold the weights labelled {weights.label!r}, found {found!r}: it waits for "
            "the run that gives engines their weights"
        )
    has_file = weights is not None and weights.path is not None
    # Weights of an engine's own start are there when it starts, and gone once a version took their place.
    is_replaced = found == control.IN_PIECES or (
        weights is not None and _lineage(found) == _lineage(weights.label)
    )
    if not has_file and (is_replaced or (weights is not None and weights.is_streamed)):
        label = "unknown" if weights is None else repr(weights.label)
        raise WeightsMissing(
            f"{engine.url} must hold the weights labelled {label}, found {found!r}, and no file holds them: "
            "it waits for the next hook.update_weights()"
        )


def _lineage(label: str | None) -> str | None:
    return None if label is None else label.rpartition(":")[0] or None
