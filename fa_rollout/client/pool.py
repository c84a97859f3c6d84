"""The engine pool: access to all engines. Token ids and sampling parameters in, validated completions out.

Invariants: one request per sample; every wait has a deadline; nothing is sent while this pool has paused the
engines, since a paused engine forgets the abort of a request that it has not started.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from fa_rollout.client.base.background import Background
from fa_rollout.client.base.clock import ActiveClock
from fa_rollout.client.base.errors import ClientError, ControlFailed, ControlRefused
from fa_rollout.client.base.pacing import Pacing
from fa_rollout.client.base.patience import Patience, Trouble
from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.client.engine.network import open_session
from fa_rollout.client.engine.standing import EngineInfo
from fa_rollout.client.fleet.dispatch import Balance, Lane, LaneDispatcher
from fa_rollout.client.fleet.fleet import Fleet
from fa_rollout.client.fleet.membership import Membership
from fa_rollout.client.fleet.opening import Opening
from fa_rollout.client.fleet.recovery import Recovery
from fa_rollout.client.fleet.updates import WeightUpdates
from fa_rollout.client.fleet.weight_stream import WeightStream
from fa_rollout.client.requests.call import Call
from fa_rollout.client.requests.flight import Flights
from fa_rollout.client.requests.retries import Retries
from fa_rollout.client.requests.sender import Sender
from fa_rollout.client.requests.statistics import PoolStatistics, RequestBooks, take_statistics
from fa_rollout.client.wire.address import engine_url
from fa_rollout.client.wire.completion import Completion
from fa_rollout.client.wire.request import TokenIds, WireIds, check_ids

_LOG = logging.getLogger(__name__)


class EnginePool:
    """All engines of a run."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        router: bool = False,
        max_concurrent_samples: int = 256,
        policy: FailurePolicy | None = None,
        balance: Balance = Balance.LEAST_LOADED,
        vocab_size: int | None = None,
        takes_over: bool = False,
        known: Sequence[EngineInfo] = (),
        ends_pauses: bool = True,
    ) -> None:
        """`max_concurrent_samples` is per engine; with `router`, `urls` is one url and its workers count.

        With `takes_over`, start continues engines that a previous process may have left paused, and waits for
        only one engine; later engines are added when they come up. `known`: what the previous process found,
        which is not probed again.
        Without `ends_pauses`, only other clients pause engines, and the pool waits for them without limit.
        `vocab_size` bounds token ids if no engine's model folder can be read here.

        Raises:
            AddressError: a malformed address.
            ValueError: no engine, or more than one router.
        """
        self._urls = list(dict.fromkeys(engine_url(url) for url in urls))
        if not self._urls or (router and len(self._urls) != 1):
            raise ValueError(f"a pool needs one or more engines, or exactly one router, found {list(urls)}")
        self.policy = policy or FailurePolicy()
        self._router = router
        self._max_per_engine = max_concurrent_samples
        self._balance = balance
        self._vocab_size = vocab_size
        self._takes_over = takes_over
        self._known = {info.url: info for info in known}
        self._ends_pauses = ends_pauses
        self._clock = ActiveClock()
        self.patience = Patience(self.policy.unavailable_timeout_s)
        """For failures that are not a request's fault."""
        self._background = Background()
        self._books = RequestBooks()
        self._calls: dict[str, Call] = {}
        self._stack = AsyncExitStack()
        self._is_open = False
        self._last_call_ended = asyncio.Event()
        self._pause_mode: str | None = None

    @property
    def engines(self) -> tuple[EngineInfo, ...]:
        """What the probes found, for engines that are or were up."""
        return tuple(self._fleet.infos)

    @property
    def urls(self) -> list[str]:
        """Where requests go: engines, or the router."""
        return [lane.url for lane in self._dispatcher.lanes]

    @property
    def capacity(self) -> int:
        """Concurrent requests of all engines when all are healthy."""
        return sum(lane.window.capacity for lane in self._dispatcher.lanes if not lane.is_leaving)

    @property
    def context_length(self) -> int | None:
        """Limit of prompt and response tokens together on every engine; None if none reports it."""
        known = [info.context_length for info in self.engines if info.context_length is not None]
        return min(known, default=None)

    async def start(self) -> None:
        """Probe every engine and start accepting requests.

        Raises:
            EngineUnavailable: engines are not up within `start_timeout_s`; the text names each.
        """
        session = await self._stack.enter_async_context(open_session(self.policy))
        ids = WireIds()
        self._fleet = Fleet(self._urls, router=self._router, session=session, policy=self.policy)
        try:
            opening = Opening(
                fleet=self._fleet,
                policy=self.policy,
                ids=ids,
                ends_pauses=self._ends_pauses,
                takes_over=self._takes_over,
                known=self._known,
            )
            late = await opening.probe_all()
        except BaseException:
            await self._stack.aclose()
            raise
        sizes = [info.vocab_size for info in self.engines if info.vocab_size is not None]
        self._vocab_size = min(sizes, default=self._vocab_size)
        await self._background.start()
        self._wire(ids)
        for engine in late:
            self._recovery.lost(engine, ControlFailed("it was not up when the others were"))
        self._is_open = True

    def _wire(self, ids: WireIds) -> None:
        self._flights = Flights(self._fleet, self._clock, self._background, self.policy)
        lanes = [Lane.to(url, self._max_per_engine, self.policy) for url in self._urls]
        self._dispatcher = LaneDispatcher(lanes, self._balance)
        self._recovery = Recovery(self._fleet, self._dispatcher, self._clock, self._background, self.policy)
        self._recovery.on_stuck = self._make_elsewhere
        self._sender = Sender(
            fleet=self._fleet,
            dispatcher=self._dispatcher,
            flights=self._flights,
            recovery=self._recovery,
            clock=self._clock,
            policy=self.policy,
            ids=ids,
            books=self._books,
            retries=Retries(
                policy=self.policy,
                clock=self._clock,
                patience=self.patience,
                dispatcher=self._dispatcher,
                recovery=self._recovery,
                is_router=self._router,
            ),
            pacing=Pacing(),
            vocab_size=self._vocab_size,
        )
        self.weights = WeightUpdates(
            self._fleet, self._recovery, pause_mode=lambda: self._pause_mode, continue_=self.continue_
        )
        """For weights in files, and for version labels."""
        self.streams = WeightStream(self._fleet, self._recovery, self.policy)
        """For weights that are sent without files."""
        self.members = Membership(
            fleet=self._fleet,
            dispatcher=self._dispatcher,
            recovery=self._recovery,
            policy=self.policy,
            ids=ids,
            max_per_engine=self._max_per_engine,
            abort_lane=self._abort_lane,
            ends_pauses=self._ends_pauses,
        )
        """Engines that join and leave."""
        self.members.resize_lanes()

    def _make_elsewhere(self, lane: Lane) -> None:
        """Abort the calls of a lane if another lane can take them."""
        if any(other.is_usable for other in self._dispatcher.lanes):
            self._abort_lane(lane)

    def _abort_lane(self, lane: Lane) -> None:
        for call in list(self._calls.values()):
            if call.flight is not None and call.flight.lane is lane:
                self._sender.abort(call)

    async def aclose(self) -> None:
        """Abort open calls, continue engines that this pool paused, close all connections; idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._last_call_ended.clear()
        try:
            async with asyncio.timeout(self.policy.control_timeout_s):
                await self.abort(list(self._calls))
                await self._leave_running()
                if self._calls:
                    await self._last_call_ended.wait()
                await self.streams.forget_groups()
                await self._fleet.hand_back()
        except TimeoutError:
            _LOG.warning("event=close_cut_short open_calls=%d", len(self._calls))
        finally:
            self._dispatcher.refuse(lambda: ClientError("a pool must be open to generate, found it closed"))
            self._dispatcher.close()
            self._recovery.close()
            try:
                await self._background.aclose()
            finally:
                await self._stack.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def generate(
        self,
        *,
        rid: str,
        input_ids: TokenIds,
        sampling_params: Mapping[str, Any],
        routing_key: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Sample one completion. `rid` must not be in use.

        `options` are more keys of the request, such as `extra_key` or `return_routed_experts`.
        An abort, requested or not, is a normal completion with `finish == "abort"`.

        Raises:
            RequestRefused: refused permanently (sent once), or ids outside the vocabulary (not sent).
            InvalidReply: every engine that was tried returned an invalid reply.
            RequestTimedOut: no reply on any attempt.
            RequestFailed: no engine answered this request for `unavailable_timeout_s`, but answered others.
            EngineUnavailable: no engine answered any request for `unavailable_timeout_s`.
        """
        self._check(rid, input_ids)
        call = Call(
            rid=rid,
            input_ids=input_ids,
            sampling_params=sampling_params,
            routing_key=routing_key,
            options=options or {},
            ticket=self._dispatcher.take_ticket(),
        )
        self._calls[rid] = call
        try:
            return await self._sender.deliver(call)
        finally:
            if call.trouble is not None:
                call.trouble.end()
            del self._calls[rid]
            if not self._calls:
                self._last_call_ended.set()

    def bear(self, trouble: Trouble | None, text: str) -> Trouble:
        """Count a useless answer that is not the request's fault, such as an abort without a token.

        Args:
            trouble: earlier failures of the same request.

        Raises:
            RequestFailed, EngineUnavailable: as in `generate`, when this lasts too long.
        """
        return self._sender.retries.bear(trouble, text)

    def _check(self, rid: str, input_ids: TokenIds) -> None:
        if not self._is_open:
            raise ClientError("a pool must be open to generate; call start, and aclose after the last call")
        self._background.check()
        if rid in self._calls:
            raise ValueError(f"a request id must be used by one call at a time, found {rid!r} in use")
        check_ids(rid, input_ids, self._vocab_size)

    async def abort(self, rids: Iterable[str]) -> None:
        """Abort calls by id; each returns as an abort with its tokens. Unknown ids are ignored."""
        for rid in rids:
            call = self._calls.get(rid)
            if call is not None:
                self._sender.abort(call)

    async def pause(self, mode: str, *, may_be_none: bool = False) -> None:
        """Pause all engines by `abort` (ends all their requests), `retract` or `in_place`; nothing is sent.

        Raises:
            ControlFailed: an engine did not pause; all are continued. With `may_be_none`, it is not an error
                if no engine can be reached.
        """
        self._dispatcher.hold()
        self._clock.stop()
        self._pause_mode = mode
        try:
            await self._fleet.pause(mode)
        except BaseException as error:
            is_outage = isinstance(error, ControlFailed) and not isinstance(error, ControlRefused)
            if is_outage and (may_be_none or self._recovery.stranded()):
                return
            self._go()
            raise

    async def continue_(self) -> None:
        """Continue engines, deadlines and dispatch.

        Raises:
            ControlFailed: an engine did not continue; the others did.
        """
        try:
            await self._fleet.continue_()
            if self._fleet.router is not None:
                await self._fleet.router.until_healthy(self.policy.control_timeout_s)
        finally:
            self._go()

    async def _leave_running(self) -> None:
        try:
            await self._fleet.continue_(also_lost=True)
        except ControlFailed as error:
            _LOG.warning("event=left_paused error=%s", error)
        if self._pause_mode is not None:
            self._go()

    def _go(self) -> None:
        self._pause_mode = None
        self._clock.go()
        self._dispatcher.release_hold()

    def statistics(self) -> PoolStatistics:
        """A snapshot of the pool."""
        return take_statistics(self._books, self._dispatcher, self._flights, self._clock)
