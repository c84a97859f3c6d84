"""Bursts: what lands at once passes in portions, and the loop serves everybody else between them."""

import asyncio
from typing import Any

import pytest

from fa_rollout.client import Completion, EnginePool
from fa_rollout.client.base.pacing import Pacing
from fa_rollout.client.requests import sender
from fa_rollout.client.wire.decode import decode_reply
from tests.client.client_kit import ask_many, run_with
from tests.kit.scripted import Lengths, Rule, Script, ScriptedEngine


def test_a_burst_of_work_passes_in_order_and_in_portions() -> None:
    async def work() -> None:
        pacing = Pacing(turn_s=0.01)
        turn, passed = 0, []

        async def pass_through(position: int) -> None:
            await pacing.enter(0.002)
            passed.append((turn, position))

        async with asyncio.TaskGroup() as group:
            for position in range(100):
                group.create_task(pass_through(position))
            while len(passed) < 100:
                await asyncio.sleep(0)
                turn += 1
        assert [position for _, position in passed] == list(range(100))
        per_turn = [sum(1 for at, _ in passed if at == wanted) for wanted in range(turn + 1)]
        assert max(per_turn) == 5

    asyncio.run(asyncio.wait_for(work(), 10))


def test_work_larger_than_a_turn_passes_alone() -> None:
    async def work() -> None:
        pacing = Pacing(turn_s=0.01)
        turn, passed = 0, []

        async def pass_through() -> None:
            await pacing.enter(1.0)
            passed.append(turn)

        async with asyncio.TaskGroup() as group:
            for _ in range(12):
                group.create_task(pass_through())
            while len(passed) < 12:
                await asyncio.sleep(0)
                turn += 1
        assert len(set(passed)) == 12

    asyncio.run(asyncio.wait_for(work(), 10))


def test_large_answers_that_land_at_once_are_decoded_one_per_turn_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_tokens, num_answers = 200_000, 16  # eight megabytes each
    script = Script(lengths=Lengths(tokens=num_tokens), rules=[Rule(rid="-r", delay_s=0.5)])
    turn, decoded = 0, []
    once = asyncio.BaseEventLoop._run_once  # type: ignore[attr-defined]

    def run_once(loop: asyncio.BaseEventLoop) -> None:
        nonlocal turn
        turn += 1
        once(loop)

    def counted(body: bytes, **settings: Any) -> Completion:
        decoded.append((turn, len(body)))
        return decode_reply(body, **settings)

    monkeypatch.setattr(asyncio.BaseEventLoop, "_run_once", run_once)
    monkeypatch.setattr(sender, "decode_reply", counted)
    with ScriptedEngine.start(script) as engine:

        async def work(pool: EnginePool) -> list[Completion | BaseException]:
            return await ask_many(pool, num_answers, sampling_params={"max_new_tokens": 1 << 20})

        for completion in run_with(engine, work):
            assert isinstance(completion, Completion)
            assert len(completion.output_ids) == num_tokens
    assert min(length for _, length in decoded) >= 8_000_000
    assert len({at for at, _ in decoded}) == num_answers
