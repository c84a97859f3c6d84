"""Outages: an engine that was taken out is probed until it works again; an outage of all has a deadline.

The one owner of each engine's status; `weights` owns what it should hold.

| an engine is out because | it is in again when |
|---|---|
| it failed, or was not reached | it is healthy and holds the current weights, which a file can give it |
| it did not accept to continue after our pause | it has accepted it, and the same |
| it lacks weights that no file holds | the next update, by those who have them, has reached it |

Invariant: an engine gets requests again only when it runs, is healthy and has the weights that were loaded
last.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from fa_rollout.client.base.background import Background
from fa_rollout.client.base.clock import ActiveClock, Timer
from fa_rollout.client.base.errors import ControlFailed, ControlRefused, EngineTaken, EngineUnavailable
from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.client.engine import control, loading
from fa_rollout.client.engine.endpoints import Engine
from fa_rollout.client.engine.standing import Status
from fa_rollout.client.fleet.dispatch import Lane, LaneDispatcher
from fa_rollout.client.fleet.fleet import Fleet
from fa_rollout.client.fleet.weights import CurrentWeights, Weights, WeightsMissing

_LOG = logging.getLogger(__name__)
_SLOWEST = 10.0
_COLD = 8
"""Requests at first for an engine that was out."""
_STUCK_AFTER = 3
"""Rounds in which an engine does not accept to continue; then what it holds is made by others."""
_HEALTH_TIMEOUT_S = 30.0
"""SGLang's /health runs a token and gives up after 20 s."""


class Recovery:
    """Takes engines out and brings them back."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: LaneDispatcher,
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
        self.weights = CurrentWeights(policy)
        self.on_stuck: Callable[[Lane], None] = lambda lane: None
        """Called while an engine that we have paused does not continue: others can make what it holds."""
        self.is_changing = False
        """Somebody else replaces the weights: nothing that an engine tells now is held for or against it."""
        self._is_looking = False
        fleet.on_lost = self.lost

    def take_out_others(self, labels: Mapping[str, str | None]) -> None:
        """Engines that report another label than the wanted one are out until they hold it.

        Args:
            labels: by address, as they were found.
        """
        assert self.weights.wanted is not None, "weights are wanted by their label"
        for engine in self._fleet.members:
            if engine.url in labels and labels[engine.url] != self.weights.wanted.label:
                self.lacks(engine, self.weights.wanted.label, labels[engine.url])

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
        engine = self._fleet.front(lane.url)
        engine.standing.last_error = lane.circuit.last_error
        self._take_out(engine)
        if all(other.circuit.is_open for other in self._dispatcher.lanes) and self._outage is None:
            deadline = self._clock.now() + self._policy.unavailable_timeout_s
            self._outage = self._clock.timer(deadline, self._give_up)

    def lost(self, engine: Engine, error: ControlFailed) -> None:
        """A control call did not reach an engine that others did without."""
        engine.standing.last_error = str(error)
        lane = self._dispatcher.lane_of(engine.url)
        if lane is None:
            _LOG.warning("event=worker_lost endpoint=%s error=%s", engine.url, error)
            self._take_out(engine)
            if self.weights.wanted is not None and self.weights.wanted.is_streamed:
                self._background.spawn(self._fleet.set_aside(engine))  # for who knows how long
        elif lane.circuit.open(str(error)):
            self.opened(lane)
        else:
            self._take_out(engine)

    def stranded(self) -> list[Engine]:
        """Engines that lack nothing but weights, when no other is left."""
        engines = self._fleet.members
        if any(not engine.standing.is_out for engine in engines):
            return []
        return [engine for engine in engines if engine.standing.status is Status.LACKS_WEIGHTS]

    def has_weights(self, engines: Iterable[Engine]) -> None:
        """These engines took the current weights, whatever they missed before."""
        for engine in engines:
            engine.standing.status = Status.SERVES
            lane = self._dispatcher.lane_of(engine.url)
            if lane is not None and lane.circuit.is_open:
                self._reopen(lane)
            self._enlist(engine)

    def _enlist(self, engine: Engine) -> None:
        """A router may send it requests again; it may take until the end of an update that it does."""
        if engine.standing.is_struck_off:
            self._background.spawn(self._fleet.reenlist(engine))

    def recheck(self) -> None:
        """An answer claimed a version that it should not have: take out engines that were started anew."""
        if self.weights.wanted is not None and not self._is_looking and not self.must_wait:
            self._is_looking = True
            self._background.spawn(self._look(self.weights.wanted))

    async def _look(self, expected: Weights) -> None:
        try:
            for engine in self._fleet.serving:
                found = await control.version_of(engine)
                self.weights.check_ours(engine, found)
                is_current = self.weights.wanted is expected and not self.must_wait
                if is_current and found != expected.label:
                    self.lacks(engine, expected.label, found)
        except (ControlFailed, EngineTaken) as error:
            _LOG.info("event=version_unknown error=%s", error)
        finally:
            self._is_looking = False

    async def changed(self, label: str | None) -> int:
        """See `EnginePool.changed`."""
        self.is_changing = False
        if label is not None:
            self.weights.want(Weights(label=label, is_others=True))
        told = await self._fleet.versions()
        if self.weights.wanted is None:
            return len(told)
        others = {url: found for url, found in told.items() if found != self.weights.wanted.label}
        for engine in await self._fleet.everyone():
            if engine.url in others:
                self.lacks(engine, self.weights.wanted.label, others[engine.url])
        return len(told) - len(others)

    def lacks(self, engine: Engine, label: str, found: str | None) -> None:
        """An engine tells another label than it should: it is out until it has these weights."""
        self.lost(engine, ControlRefused(f"{engine.url} must report version {label!r}, found {found!r}"))

    def overloaded(self, lane: Lane) -> None:
        """A 503: a router without any worker says the same as an engine with too much to do."""
        is_router = self._fleet.is_router(self._fleet.front(lane.url))
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
        if not engine.standing.is_out:
            engine.standing.status = Status.OUT
            self._background.spawn(self._bring_back(engine))

    def _give_up(self) -> None:
        text = str(self.unavailable(""))
        self._dispatcher.refuse(lambda: EngineUnavailable(text))

    def unavailable(self, text: str) -> EngineUnavailable:
        """Patience has ended; `text`: what befell the request that ended it."""
        lasts = "; ".join(f"{lane.url}: {lane.circuit.last_error or text}" for lane in self._dispatcher.lanes)
        return EngineUnavailable(
            f"one engine must work, found none for {self._policy.unavailable_timeout_s:g} s; {lasts}"
        )

    async def _bring_back(self, engine: Engine) -> None:
        interval_s, num_tries = self._policy.probe_interval_s, 0
        while True:
            await asyncio.sleep(interval_s)
            if not engine.standing.is_out:
                return  # it has left, or an update has reached it
            lane = self._dispatcher.lane_of(engine.url)
            if lane is not None and time.monotonic() < lane.circuit.rests_until:
                await self._let_run(engine)
                continue
            if await self.is_ready(engine):
                break
            num_tries += 1
            if not engine.standing.is_paused:
                interval_s = min(interval_s * 1.5, _SLOWEST * self._policy.probe_interval_s)
            elif num_tries >= _STUCK_AFTER and lane is not None and not self.must_wait:
                self.on_stuck(lane)
        engine.standing.status = Status.SERVES
        is_proven = lane is None or not lane.circuit.num_exposed
        _LOG.log(logging.WARNING if is_proven else logging.INFO, "event=engine_back endpoint=%s", engine.url)
        self._enlist(engine)
        if lane is not None:
            self._reopen(lane)

    async def _let_run(self, engine: Engine) -> None:
        """It may serve others, though not us."""
        if engine.standing.is_paused and not self.must_wait:
            with suppress(ControlFailed):
                await control.continue_(engine, limit_s=self._policy.control_try_s)

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

    def joined(self) -> None:
        """There is one engine more, so no outage of all."""
        self._end_outage()

    def left(self, url: str) -> None:
        """An engine less, which nobody brings back."""
        self._fleet.known(url).standing.status = Status.SERVES  # so that its probes end
        self._fleet.forget(url)

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
            if engine.standing.is_paused:
                await control.continue_(engine, limit_s=self._policy.control_try_s)
            await loading.end_session(engine)
            if await engine.status("/health", _HEALTH_TIMEOUT_S) != 200:
                return False
            if self._fleet.is_router(engine):
                return await self._fleet.has_healthy_workers()
            await self.weights.renew(engine)
        except EngineTaken:
            return False  # which ends the run
        except ControlFailed as error:
            _LOG.info("event=engine_still_out endpoint=%s error=%s", engine.url, error)
            if engine.standing.is_out:
                is_all = isinstance(error, WeightsMissing)
                engine.standing.status = Status.LACKS_WEIGHTS if is_all else Status.OUT
            return False
        return True
