"""Getting one sample: a slot, a request, and the one layer of retries.

Who waits for whom: a call waits for a slot (the dispatcher), for its answer (one HTTP request), and between
attempts for its back-off; an abort or the call's deadline ends each of these waits.
Invariants: every attempt has an id of its own; a slot is given back before its answer is looked at.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fa_rollout.client.base.clock import ActiveClock
from fa_rollout.client.base.errors import (
    EngineOverloaded,
    FailureClass,
    InvalidReply,
    RequestFailed,
    RequestRefused,
    RequestTimedOut,
)
from fa_rollout.client.base.policy import FailurePolicy, backoff_s
from fa_rollout.client.base.portions import Turnstile
from fa_rollout.client.engine.endpoints import HttpFailure
from fa_rollout.client.fleet.dispatch import Dispatcher, Lane
from fa_rollout.client.fleet.fleet import Fleet
from fa_rollout.client.fleet.recovery import Recovery
from fa_rollout.client.requests.flight import Flight, Flights, end_scope
from fa_rollout.client.requests.statistics import Books
from fa_rollout.client.wire.completion import Completion, empty_abort
from fa_rollout.client.wire.decode import decode_reply
from fa_rollout.client.wire.request import TokenIds, WireIds, generate_body
from fa_rollout.client.wire.stream import LastEvent

T = TypeVar("T")

_SEND_S = 3e-4
_ACCEPT_S = 1e-4
_DECODE_S_PER_BYTE = 3e-9
"""Estimates of CPU time, for the turnstile."""


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One sample that is asked for: all its attempts."""

    rid: str
    input_ids: TokenIds
    sampling_params: Mapping[str, Any]
    routing_key: str | None
    options: Mapping[str, Any]
    deadline: float | None
    """On the active clock."""
    ticket: int
    is_aborted: bool = False
    flight: Flight | None = None
    pause: asyncio.Timeout | None = None
    """The scope of a wait for a slot or of a back-off."""


class _Expired(HttpFailure):
    """Silence until the deadline."""

    def __init__(self, text: str) -> None:
        super().__init__(FailureClass.TRANSIENT, text)


class _Interrupted(Exception):
    """A wait was ended by an abort or by the call's deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Sends calls over the lanes."""

    fleet: Fleet
    dispatcher: Dispatcher
    flights: Flights
    recovery: Recovery
    clock: ActiveClock
    policy: FailurePolicy
    ids: WireIds
    books: Books
    turnstile: Turnstile
    stream: bool
    vocab_size: int | None = None

    async def deliver(self, call: Call) -> Completion:
        """The answer to a call; see `EnginePool.generate` for what it raises."""
        lane: Lane | None = None
        for attempt in range(1, self.policy.max_attempts + 1):
            try:
                lane = await self._slot(call, lane)
                return await self._attempt(call, lane)
            except _Interrupted:
                return self._interrupted(call, lane)
            except HttpFailure as failure:
                assert lane is not None, "a request fails on some lane"
                self._note(lane, failure)
                if attempt == self.policy.max_attempts or not self._may_retry(call, failure):
                    raise _final(call, lane, attempt, failure) from failure
                delay_s = backoff_s(self.policy, failure.failure, attempt, random.random())
                delay_s = max(delay_s, self._asked_for_s(failure))
            try:
                await self._wait(call, asyncio.sleep(delay_s))
            except _Interrupted:
                return self._interrupted(call, lane)
        raise AssertionError("the last attempt returns or raises")

    def abort(self, call: Call) -> None:
        """End a call: at once where it waits, by its engine where it is in the air."""
        call.is_aborted = True
        if call.flight is not None:
            self.flights.abort(call.flight)
        elif call.pause is not None:
            end_scope(call.pause)

    async def _slot(self, call: Call, avoid: Lane | None) -> Lane:
        while not call.is_aborted:
            lane = self.dispatcher.try_acquire(call.routing_key, avoid)
            if lane is None:
                lane = await self._wait(call, self.dispatcher.acquire(call.routing_key, call.ticket, avoid))
            try:
                await self.turnstile.enter(_SEND_S)
            except asyncio.CancelledError:
                self.dispatcher.release(lane)
                raise
            if not call.is_aborted and not self.dispatcher.is_held:
                return lane
            self.dispatcher.release(lane)  # aborted, or paused, while it stood at the turnstile
        raise _Interrupted

    async def _wait(self, call: Call, what: Awaitable[T]) -> T:
        scope = asyncio.timeout(0 if call.is_aborted else None)
        timer = None if call.deadline is None else self.clock.timer(call.deadline, lambda: end_scope(scope))
        call.pause = scope
        try:
            async with scope:
                return await what
        except TimeoutError:
            raise _Interrupted from None
        finally:
            call.pause = None
            if timer is not None:
                timer.cancel()

    async def _attempt(self, call: Call, lane: Lane) -> Completion:
        flight = Flight(rid=call.rid, wire_id=self.ids.make(call.rid), lane=lane)
        deadline = self.clock.now() + self.policy.request_timeout_s
        self.flights.launch(flight, deadline if call.deadline is None else min(deadline, call.deadline))
        call.flight = flight
        last_event = LastEvent() if self.stream else None
        may_run = True
        try:
            async with flight.scope:
                body = await self._exchange(call, flight, last_event)
            may_run = False
        except TimeoutError:
            return self._cut_off(call, flight, last_event)
        except HttpFailure as failure:
            may_run = failure.may_run
            return self._salvage(last_event, call, flight, failure)
        finally:
            call.flight = None
            self.flights.land(flight, may_run=may_run)
            self.dispatcher.release(lane)
        return await self._accept(body, call, flight)

    async def _exchange(self, call: Call, flight: Flight, last_event: LastEvent | None) -> bytes:
        request = generate_body(
            flight.wire_id, call.input_ids, call.sampling_params, stream=self.stream, options=call.options
        )
        return await self.fleet.fronts[flight.lane.url].generate(request, call.routing_key, last_event)

    async def _accept(self, body: bytes, call: Call, flight: Flight) -> Completion:
        lane = flight.lane
        lane.circuit.succeed()
        lane.window.grow()
        await self.turnstile.enter(_ACCEPT_S + len(body) * _DECODE_S_PER_BYTE)
        try:
            completion = decode_reply(body, engine=lane.url, wire_id=flight.wire_id)
            self._check(call, completion)
        except InvalidReply as error:
            self.books.fail(lane.url, FailureClass.INVALID, str(error))
            raise
        if flight.is_expired and completion.finish == "abort" and not len(completion.output_ids):
            raise _Expired(f"no token within {self.policy.request_timeout_s:g} s")
        self.books.finish(lane.url, flight.started_s, completion)
        return completion

    def _check(self, call: Call, completion: Completion) -> None:
        """Raise InvalidReply for an answer to less than was sent, or with ids that the model has not."""
        told, sent = completion.prompt_tokens, len(call.input_ids)
        if told is not None and told < sent:
            raise InvalidReply(f"{completion.engine} must answer all {sent} prompt ids, found {told} taken")
        highest = completion.output_ids.max(initial=0)
        if self.vocab_size is not None and highest >= self.vocab_size:
            raise InvalidReply(
                f"{completion.engine} must answer with ids below {self.vocab_size}, found {highest}"
            )

    def _cut_off(self, call: Call, flight: Flight, last_event: LastEvent | None) -> Completion:
        """The wire was cut: the engine did not give back an aborted request within the grace."""
        silence = _Expired(f"no answer within {self.policy.request_timeout_s:g} s")
        if flight.is_expired:
            return self._salvage(last_event, call, flight, silence)
        try:
            return self._salvage(last_event, call, flight, silence)
        except _Expired:
            return empty_abort(flight.lane.url)

    def _salvage(
        self, last_event: LastEvent | None, call: Call, flight: Flight, failure: HttpFailure
    ) -> Completion:
        """What a broken stream brought, as an abort; without any true token the failure stands."""
        lane, wire_id = flight.lane, flight.wire_id
        if last_event is None or not last_event.payload:
            raise failure
        try:
            completion = decode_reply(last_event.payload, engine=lane.url, wire_id=wire_id, partial=True)
            self._check(call, completion)
        except InvalidReply as error:
            self.books.fail(lane.url, FailureClass.INVALID, str(error))
            raise failure from error
        if not len(completion.output_ids):
            raise failure
        self._note(lane, failure)
        return completion

    def _note(self, lane: Lane, failure: HttpFailure) -> None:
        self.books.fail(lane.url, failure.failure, str(failure))
        if failure.failure is FailureClass.OVERLOAD:
            now = time.monotonic()
            lane.window.cut(
                lane.in_flight + 1,
                now,
                self.policy.overload_base_s,
                self.policy.backoff_cap_s,
                random.random(),
            )
            if not self.fleet.is_router(self.fleet.fronts[lane.url]):  # else it is one worker's word
                lane.window.rest(now + self._asked_for_s(failure))
            self.recovery.overloaded(lane)
        elif failure.failure is FailureClass.TRANSIENT and lane.circuit.fail(str(failure)):
            self.recovery.opened(lane)

    def _asked_for_s(self, failure: HttpFailure) -> float:
        """How long the server asked to be left alone, within reason."""
        return min(failure.retry_after_s, self.policy.backoff_cap_s)

    def _may_retry(self, call: Call, failure: HttpFailure) -> bool:
        if call.deadline is not None and self.clock.now() >= call.deadline - 1e-3:
            return False
        return failure.failure is not FailureClass.PERMANENT

    def _interrupted(self, call: Call, lane: Lane | None) -> Completion:
        if call.is_aborted:
            return empty_abort(lane.url if lane is not None else "")
        raise RequestTimedOut(
            f"request {call.rid} must be answered by its deadline, found it waiting for a free engine"
        )


def _final(call: Call, lane: Lane, attempt: int, failure: HttpFailure) -> RequestFailed:
    text = f"request {call.rid} failed at {lane.url} on attempt {attempt}: {failure}"
    if isinstance(failure, _Expired):
        return RequestTimedOut(text)
    if failure.failure is FailureClass.PERMANENT:
        return RequestRefused(text)
    return EngineOverloaded(text) if failure.failure is FailureClass.OVERLOAD else RequestFailed(text)
