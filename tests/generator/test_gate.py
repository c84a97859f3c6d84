"""Gates: named holds, and deadlines whose clock stands still while a gate is closed."""

import asyncio
from functools import partial

import pytest

from fa_rollout.client.base.patience import Patience
from fa_rollout.generator.base.errors import SampleFailed
from fa_rollout.generator.base.gate import Gate


def test_a_gate_opens_when_the_last_hold_is_released() -> None:
    async def scenario() -> None:
        opened: list[int] = []
        gate = Gate(on_open=lambda: opened.append(1))
        gate.hold("update")
        gate.hold("ring")
        gate.release("update")
        assert not gate.is_open
        assert not opened
        gate.release("ring")
        gate.release("ring")
        assert gate.is_open
        assert opened == [1]
        await asyncio.wait_for(gate.passed(), 1)

    asyncio.run(scenario())


def test_who_waits_passes_only_if_the_gate_is_still_open() -> None:
    async def scenario() -> None:
        gate = Gate()
        gate.hold("update")
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(gate.passed())
            await asyncio.sleep(0)
            gate.release("update")
            gate.hold("update")
            await asyncio.sleep(0.01)
            assert not waiting.done()
            gate.release("update")

    asyncio.run(scenario())


def test_a_deadline_ends_what_takes_longer() -> None:
    async def scenario() -> None:
        async with Gate().deadline(0.02):
            await asyncio.sleep(10)

    with pytest.raises(SampleFailed, match=r"^deadline: not done within 0\.02 s"):
        asyncio.run(scenario())


def test_a_timeout_of_the_body_is_not_taken_for_the_deadline() -> None:
    async def scenario() -> None:
        async with Gate().deadline(60):
            raise TimeoutError("of the user's own")

    with pytest.raises(TimeoutError, match="user's own"):
        asyncio.run(scenario())


@pytest.mark.parametrize("closes_first", [True, False])
def test_time_behind_a_closed_gate_does_not_count(closes_first: bool) -> None:
    async def scenario() -> None:
        gate = Gate()
        if closes_first:
            gate.hold("update")
        async with gate.deadline(0.05):
            gate.hold("update")
            await asyncio.sleep(0.15)
            gate.release("update")
            await asyncio.sleep(0)

    asyncio.run(scenario())


def test_after_a_pause_the_rest_of_the_time_is_left() -> None:
    async def scenario() -> None:
        gate = Gate()
        async with gate.deadline(0.05):
            gate.hold("update")
            await asyncio.sleep(0.1)
            gate.release("update")
            await asyncio.sleep(10)

    with pytest.raises(SampleFailed):
        asyncio.run(asyncio.wait_for(scenario(), 5))


def test_no_deadline_is_none_also_across_a_pause() -> None:
    async def scenario() -> None:
        gate = Gate()
        async with gate.deadline(None):
            gate.hold("update")
            gate.release("update")
            await asyncio.sleep(0.02)

    asyncio.run(scenario())


def test_time_in_which_a_gate_is_frozen_does_not_count_though_work_passes() -> None:
    async def scenario() -> None:
        gate = Gate()
        async with gate.deadline(0.05):
            gate.freeze("engines", True)
            gate.hold("update")
            gate.release("update")
            await gate.passed()
            await asyncio.sleep(0.1)
            gate.freeze("engines", False)
            await asyncio.sleep(10)

    with pytest.raises(SampleFailed):
        asyncio.run(asyncio.wait_for(scenario(), 5))


def test_a_group_whose_request_waits_for_its_next_try_spends_no_time_though_others_are_answered() -> None:
    async def scenario() -> None:
        gate, patience = Gate(), Patience(60.0)
        patience.on_change = partial(gate.freeze, "engines")
        async with gate.deadline(0.05):
            trouble = patience.met(None, 0.0)
            patience.answered(0.1)  # another group's request
            assert not gate.stops_clocks
            await asyncio.sleep(0.1)
            trouble.end()
            await asyncio.sleep(10)

    with pytest.raises(SampleFailed):
        asyncio.run(asyncio.wait_for(scenario(), 5))


def test_trouble_of_one_group_stops_no_other_groups_clock() -> None:
    async def waits(gate: Gate, patience: Patience) -> None:
        async with gate.deadline(0.05):
            patience.met(None, 0.0)
            await asyncio.sleep(0.3)

    async def scenario() -> None:
        gate, patience = Gate(), Patience(60.0)
        waiting = asyncio.create_task(waits(gate, patience))
        with pytest.raises(SampleFailed):
            async with gate.deadline(0.1):
                await asyncio.sleep(10)
        await waiting

    asyncio.run(asyncio.wait_for(scenario(), 5))
