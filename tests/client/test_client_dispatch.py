"""Slots: first come first served, handed over at once, never more than an engine may hold."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fa_rollout.client.base.circuit import Circuit, Window
from fa_rollout.client.base.clock import ActiveClock
from fa_rollout.client.fleet.dispatch import Balance, Lane, LaneDispatcher
from tests.client.client_kit import until


def lanes(*capacities: int) -> list[Lane]:
    return [
        Lane(url=f"http://e{position}", window=Window(capacity), circuit=Circuit(1))
        for position, capacity in enumerate(capacities)
    ]


def dispatching(work: Callable[[], Awaitable[None]]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), 10))


async def grant(dispatcher: LaneDispatcher, key: str | None = None, avoid: Lane | None = None) -> Lane:
    lane = dispatcher.try_acquire(key, avoid)
    return lane or await dispatcher.acquire(key, dispatcher.take_ticket(), avoid)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_freed_slot_goes_to_the_oldest_waiter_in_the_same_turn_of_the_loop() -> None:
    async def work() -> None:
        dispatcher = LaneDispatcher(lanes(1))
        order: list[int] = []
        held = await grant(dispatcher)

        async def wait(position: int) -> None:
            lane = await grant(dispatcher)
            order.append(position)
            dispatcher.release(lane)

        async with asyncio.TaskGroup() as group:
            for position in range(5):
                group.create_task(wait(position))
            await settle()
            assert dispatcher.num_waiting == 5
            dispatcher.release(held)
            assert held.in_flight == 1
        assert order == [0, 1, 2, 3, 4]
        assert held.in_flight == 0
        assert dispatcher.num_waiting == 0

    dispatching(work)


def test_the_least_loaded_engine_is_taken_by_share_of_its_capacity() -> None:
    async def work() -> None:
        small, large = lanes(2, 8)
        dispatcher = LaneDispatcher([small, large])
        for _ in range(10):
            await grant(dispatcher)
        assert (small.in_flight, large.in_flight) == (2, 8)
        for _ in range(4):
            dispatcher.release(large)
        assert [await grant(dispatcher) for _ in range(2)] == [large, large]

    dispatching(work)


def test_round_robin_goes_round() -> None:
    async def work() -> None:
        many = lanes(9, 9, 9)
        dispatcher = LaneDispatcher(many, Balance.ROUND_ROBIN)
        taken = [await grant(dispatcher) for _ in range(9)]
        assert {lane.url: taken.count(lane) for lane in many} == {lane.url: 3 for lane in many}

    dispatching(work)


def test_a_key_stays_with_its_engine_and_only_an_outage_moves_it() -> None:
    async def work() -> None:
        many = lanes(100, 100, 100)
        dispatcher = LaneDispatcher(many, Balance.STICKY)
        homes = {key: await grant(dispatcher, key) for key in map(str, range(30))}
        assert len({lane.url for lane in homes.values()}) == 3
        for key, home in homes.items():
            assert await grant(dispatcher, key) is home
        out = many[0]
        out.circuit.open("gone")
        dispatcher.rebind(out)
        for key, home in homes.items():
            lane = await grant(dispatcher, key)
            assert lane is not out
            assert lane is home or home is out

    dispatching(work)


def test_waiters_of_an_engine_that_is_lost_go_to_another() -> None:
    async def work() -> None:
        many = lanes(1, 1)
        dispatcher = LaneDispatcher(many, Balance.STICKY)
        home = await grant(dispatcher, "k")
        waiter = asyncio.create_task(grant(dispatcher, "k"))
        await settle()
        assert not waiter.done()
        home.circuit.open("gone")
        dispatcher.rebind(home)
        assert await waiter is not home

    dispatching(work)


def test_a_cancelled_waiter_keeps_no_slot_even_one_it_was_just_given() -> None:
    async def work() -> None:
        (lane,) = lanes(1)
        dispatcher = LaneDispatcher([lane])
        await grant(dispatcher)
        waiters = [asyncio.create_task(grant(dispatcher)) for _ in range(3)]
        await settle()
        waiters[0].cancel()
        dispatcher.release(lane)
        waiters[1].cancel()  # granted in this turn, cancelled before it could run
        await asyncio.wait(waiters[:2])
        assert await waiters[2] is lane
        dispatcher.release(lane)
        assert lane.in_flight == 0

    dispatching(work)


def test_a_retry_keeps_its_place_and_shuns_the_engine_that_failed_it() -> None:
    async def work() -> None:
        many = lanes(2, 2)
        dispatcher = LaneDispatcher(many)
        early = dispatcher.take_ticket()
        held = [await grant(dispatcher) for _ in range(4)]
        late = asyncio.create_task(grant(dispatcher))
        await settle()
        retry = asyncio.create_task(dispatcher.acquire(None, early, held[0]))
        await settle()
        dispatcher.release(held[0])
        await settle()
        assert retry.done()  # older, so first, though the only free slot is on the engine it would shun
        assert not late.done()
        dispatcher.release(held[1])
        await late
        for lane in [many[0], many[1]]:
            dispatcher.release(lane)
        assert await grant(dispatcher, None, many[0]) is many[1]

    dispatching(work)


def test_nothing_is_granted_while_held() -> None:
    async def work() -> None:
        (lane,) = lanes(4)
        dispatcher = LaneDispatcher([lane])
        dispatcher.hold()
        waiter = asyncio.create_task(grant(dispatcher))
        await settle()
        assert lane.in_flight == 0
        dispatcher.release_hold()
        assert await waiter is lane

    dispatching(work)


def test_an_engine_at_rest_after_an_overload_is_used_when_its_rest_is_over() -> None:
    async def work() -> None:
        (lane,) = lanes(4)
        dispatcher = LaneDispatcher([lane])
        lane.window.not_before = asyncio.get_running_loop().time() + 0.05
        assert dispatcher.try_acquire(None) is None
        assert await grant(dispatcher) is lane
        assert asyncio.get_running_loop().time() >= lane.window.not_before
        dispatcher.close()

    dispatching(work)


def test_a_refusal_reaches_those_who_wait_and_those_who_come() -> None:
    async def work() -> None:
        (lane,) = lanes(1)
        dispatcher = LaneDispatcher([lane])
        await grant(dispatcher)
        waiter = asyncio.create_task(grant(dispatcher))
        await settle()
        dispatcher.refuse(lambda: ConnectionError("all gone"))
        for late in (waiter, grant(dispatcher)):
            with pytest.raises(ConnectionError, match="all gone"):
                await late
        dispatcher.refuse(None)
        dispatcher.release(lane)
        assert await grant(dispatcher) is lane

    dispatching(work)


def test_paused_time_does_not_count() -> None:
    now = [100.0]
    clock = ActiveClock(lambda: now[0])
    begin = clock.now()
    now[0] += 5
    clock.stop()
    now[0] += 1000
    assert clock.now() - begin == 5
    clock.stop()
    clock.go()
    clock.go()
    now[0] += 2
    assert clock.now() - begin == 7
    assert clock.lost_s == 1000


def test_a_timer_that_falls_due_in_a_pause_fires_when_its_rest_has_run_afterwards() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        clock = ActiveClock()
        fired: list[float] = []
        clock.timer(clock.now() + 0.1, lambda: fired.append(clock.now()))
        never = clock.timer(clock.now() + 0.1, lambda: fired.append(-1.0))
        deadline = clock.now() + 0.1
        clock.stop()
        await asyncio.sleep(0.2)
        assert not fired
        never.cancel()
        went_on = loop.time()
        clock.go()
        await until(lambda: bool(fired))
        assert fired[0] >= deadline - 2e-3
        assert loop.time() - went_on >= 0.09

    dispatching(work)
