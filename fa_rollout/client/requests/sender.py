"""Getting one sample: a slot, a request, and the one layer of retries (see `retries`).

Who waits for whom: a call waits for a slot (the dispatcher), for its answer (one HTTP request), and between
attempts for its back-off; an abort ends each of these waits.
Invariants: every attempt has an id of its own; a slot is given back before its answer is looked at.
"""

import asyncio
import random
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from fa_rollout.client.base.clock import ActiveClock
from fa_rollout.client.base.errors import (
    FailureClass,
    InvalidReply,
)
from fa_rollout.client.base.pacing import Pacing
from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.client.engine.endpoints import HttpFailure, failure_of
from fa_rollout.client.fleet.dispatch import Lane, LaneDispatcher
from fa_rollout.client.fleet.fleet import Fleet
from fa_rollout.client.fleet.recovery import Recovery
from fa_rollout.client.requests.call import Call
from fa_rollout.client.requests.flight import Flight, Flights, end_scope
from fa_rollout.client.requests.retries import Retries
from fa_rollout.client.requests.statistics import RequestBooks
from fa_rollout.client.wire.completion import Completion, empty_abort
from fa_rollout.client.wire.decode import decode_reply
from fa_rollout.client.wire.request import WireIds, answer_limit, generate_body
from fa_rollout.client.wire.verdict import ServerVerdict

T = TypeVar("T")

_SEND_S = 3e-4
_ACCEPT_S = 1e-4
_DECODE_S_PER_BYTE = 3e-9
"""Estimated CPU time, for pacing."""


class _Expired(HttpFailure):
    """Silence until the deadline."""

    def __init__(self, text: str) -> None:
        super().__init__(FailureClass.SILENCE, text)


class _Interrupted(Exception):
    """An abort ended a wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Sends calls over the lanes."""

    fleet: Fleet
    dispatcher: LaneDispatcher
    flights: Flights
    recovery: Recovery
    clock: ActiveClock
    policy: FailurePolicy
    ids: WireIds
    books: RequestBooks
    retries: Retries
    pacing: Pacing
    vocab_size: int | None = None

    async def deliver(self, call: Call) -> Completion:
        """The answer to a call; see `EnginePool.generate` for what it raises."""
        lane: Lane | None = None
        while True:
            try:
                lane = await self._slot(call)
                return await self._attempt(call, lane)
            except _Interrupted:
                return empty_abort("" if lane is None else lane.url)
            except HttpFailure as failure:
                assert lane is not None, "a request fails on some lane"
                self._note(lane, failure)
                delay_s = self.retries.delay_s(call, lane, failure)
            try:
                await self._wait(call, asyncio.sleep(delay_s))
            except _Interrupted:
                return empty_abort(lane.url)

    def abort(self, call: Call) -> None:
        """End a call: at once where it waits, by its engine where it is in the air."""
        call.is_aborted = True
        if call.flight is not None:
            self.flights.abort(call.flight)
        elif call.pause is not None:
            end_scope(call.pause)

    async def _slot(self, call: Call) -> Lane:
        key, avoid, barred = call.routing_key, call.avoid, call.liars
        while not call.is_aborted:
            lane = self.dispatcher.try_acquire(key, avoid, barred)
            if lane is None:
                lane = await self._wait(call, self.dispatcher.acquire(key, call.ticket, avoid, barred))
            try:
                await self.pacing.enter(_SEND_S)
            except asyncio.CancelledError:
                self.dispatcher.release(lane)
                raise
            if not call.is_aborted and not self.dispatcher.is_held:
                return lane
            self.dispatcher.release(lane)  # aborted, or paused, while it waited for its turn
        raise _Interrupted

    async def _wait(self, call: Call, what: Awaitable[T]) -> T:
        scope = asyncio.timeout(0 if call.is_aborted else None)
        call.pause = scope
        try:
            async with scope:
                return await what
        except TimeoutError:
            raise _Interrupted from None
        finally:
            call.pause = None

    async def _attempt(self, call: Call, lane: Lane) -> Completion:
        lane.move(0)
        flight = Flight(
            rid=call.rid,
            wire_id=self.ids.make(call.rid),
            lane=lane,
            started_slot_s=lane.slot_s,
            started_active_s=self.clock.now(),
        )
        self.flights.launch(flight, self.clock.now() + self.policy.request_timeout_s)
        call.flight = flight
        limit = answer_limit(call.input_ids, call.sampling_params, call.options)
        may_run = True
        try:
            async with flight.scope:
                body = await self._exchange(call, flight, limit)
            may_run = False
        except TimeoutError:
            return self._cut_off(flight)
        except HttpFailure as failure:
            may_run = failure.may_run
            raise
        finally:
            call.flight = None
            self.flights.land(flight, may_run=may_run)
            self.dispatcher.release(lane)
        return await self._accept(body, call, flight)

    async def _exchange(self, call: Call, flight: Flight, max_bytes: int) -> bytes:
        request = generate_body(flight.wire_id, call.input_ids, call.sampling_params, options=call.options)
        front = self.fleet.front(flight.lane.url)
        return await front.generate(request, call.routing_key, max_bytes)

    async def _accept(self, body: bytes, call: Call, flight: Flight) -> Completion:
        """The completion of a whole body, once it has been checked.

        Raises:
            HttpFailure: it is untrue, or tells an error.
        """
        lane = flight.lane
        await self.pacing.enter(_ACCEPT_S + len(body) * _DECODE_S_PER_BYTE)
        try:
            completion = decode_reply(body, engine=lane.url, wire_id=flight.wire_id)
            self._check(call, completion)
        except InvalidReply as error:
            raise HttpFailure(FailureClass.INVALID, str(error)) from error
        except ServerVerdict as verdict:
            return self._made_before(verdict, call, flight)
        if flight.is_expired and completion.finish == "abort" and not len(completion.output_ids):
            raise _Expired(f"no token within {self.policy.request_timeout_s:g} s")
        lane.circuit.succeed()
        lane.window.grow()
        if completion.finish != "abort" or len(completion.output_ids):
            self.retries.patience.answered(self.clock.now())
        self.books.finish(lane.url, flight.started_s, completion)
        lane.move(0)
        wall_s = max(1e-6, time.monotonic() - flight.started_s)
        beside = (lane.slot_s - flight.started_slot_s) / wall_s
        self.books.paced(
            lane.url, len(completion.output_ids), beside, self.clock.now() - flight.started_active_s
        )
        return completion

    def _made_before(self, verdict: ServerVerdict, call: Call, flight: Flight) -> Completion:
        """The tokens from before a condition of the server ended the answer; without any it is a failure."""
        failure = failure_of(verdict)
        if verdict.completion is None or not failure.failure.is_condition:
            raise failure from verdict
        try:
            self._check(call, verdict.completion)
        except InvalidReply as error:
            raise HttpFailure(FailureClass.INVALID, str(error)) from error
        self.books.finish(flight.lane.url, flight.started_s, verdict.completion)
        self._note(flight.lane, failure)
        return verdict.completion

    def _check(self, call: Call, completion: Completion) -> None:
        """Raise InvalidReply for an answer to less than was sent, or with ids that the model has not."""
        told, sent = completion.prompt_tokens, len(call.input_ids)
        is_empty = completion.finish == "abort" and not len(completion.output_ids)
        if told is not None and told < sent and not is_empty:
            raise InvalidReply(f"{completion.engine} must answer all {sent} prompt ids, found {told} taken")
        highest = completion.output_ids.max(initial=0)
        if self.vocab_size is not None and highest >= self.vocab_size:
            raise InvalidReply(
                f"{completion.engine} must answer with ids below {self.vocab_size}, found {highest}"
            )

    def _cut_off(self, flight: Flight) -> Completion:
        """The wire was cut: the engine did not give back an aborted request within the grace."""
        if flight.is_expired:
            raise _Expired(f"no answer within {self.policy.request_timeout_s:g} s")
        return empty_abort(flight.lane.url)

    def _note(self, lane: Lane, failure: HttpFailure) -> None:
        """What a failure says of the engine."""
        self.books.fail(lane.url, failure.failure, str(failure))
        if failure.failure is not FailureClass.PERMANENT:
            lane.circuit.last_error = str(failure)
        match failure.failure:
            case FailureClass.OVERLOAD:
                self._slow_down(lane, failure)
            case FailureClass.TRANSIENT | FailureClass.SILENCE:
                if lane.circuit.fail(str(failure)):
                    self.recovery.opened(lane)
            case FailureClass.INVALID:
                is_last = not self.dispatcher.others(frozenset({lane}))
                if lane.circuit.lie(str(failure), time.monotonic(), is_last=is_last):
                    self.recovery.exposed(lane)

    def _slow_down(self, lane: Lane, failure: HttpFailure) -> None:
        """Dispatch to an overloaded engine falls."""
        now, policy = time.monotonic(), self.policy
        lane.window.cut(
            lane.in_flight + 1, now, policy.overload_base_s, policy.backoff_cap_s, random.random()
        )
        if not self.fleet.is_router(self.fleet.front(lane.url)):  # else it is one worker's word
            lane.window.rest(now + self.retries.asked_for_s(failure))
        self.recovery.overloaded(lane)
