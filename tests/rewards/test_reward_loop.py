"""Async rewards are awaited in the loop, and end there in time."""

import asyncio
import functools
import logging
from typing import Any

import pytest
from reward_functions import Judge, async_by_member, by_member
from reward_kit import children, failure, make_sample, running, score, values

from fa_rollout.rewards.outcomes import FailureReason
from fa_rollout.sample import Sample


@pytest.mark.parametrize(
    ("function", "value"),
    [
        ("reward_functions.async_by_member", 1.5),
        ("reward_functions.judge", 0.5),
        ("reward_functions.bound_method", 1.0),
        ("reward_functions:judge.method", 1.0),
        (async_by_member, 1.5),
        (Judge(0.25), 0.25),
        (Judge(0.25).method, 0.5),
        (functools.partial(Judge.method, Judge(1.0)), 2.0),
    ],
)
def test_async_functions_callable_objects_and_bound_methods_are_awaited_in_this_process(
    function: Any, value: float
) -> None:
    async def run() -> None:
        before = children()
        async with running(function) as runner:
            assert children() == before, "no worker stays for a function that needs none"
            assert values(await runner.score([make_sample(3)] * 2)) == [value] * 2

    asyncio.run(run())


def test_a_plain_function_is_called_in_the_loop_where_that_is_asked_for() -> None:
    for function in ("reward_functions.by_member", by_member):
        assert values(score([make_sample(1), make_sample(2)], function, in_loop=True)) == [0.5, 1.0]


def test_samples_of_a_group_are_scored_at_the_same_time() -> None:
    async def meet(sample: Sample, barrier: list[asyncio.Barrier] = []) -> float:  # noqa: B006
        if not barrier:
            barrier.append(asyncio.Barrier(8))
        await barrier[0].wait()
        return 1.0

    assert values(score([make_sample(m) for m in range(8)], meet, timeout_s=30)) == [1.0] * 8


def test_an_async_group_function_gets_the_group() -> None:
    async def ranks(samples: list[Sample]) -> list[float]:
        return [sample.member * 2 for sample in samples]

    assert values(score([make_sample(m) for m in range(3)], ranks, group=True)) == [0, 2, 4]


def test_an_async_reward_that_takes_too_long_is_cancelled_and_the_others_keep_theirs() -> None:
    cancelled = []

    async def sometimes_slow(sample: Sample) -> float:
        if sample.member == 1:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                cancelled.append(sample.member)
                raise
        return 1.0

    outcomes = score([make_sample(m) for m in range(3)], sometimes_slow, timeout_s=0.1)
    assert values(outcomes) == [1.0, FailureReason.TIMEOUT, 1.0]
    assert cancelled == [1]


def test_an_async_reward_that_ignores_its_cancellation_holds_nobody_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        let_go = asyncio.Event()

        async def stubborn(sample: Sample) -> float:
            while not let_go.is_set():
                try:
                    await let_go.wait()
                except asyncio.CancelledError:
                    continue
            return 1.0

        async with running(stubborn, timeout_s=0.1) as runner:
            assert values(await runner.score([make_sample()])) == [FailureReason.TIMEOUT]
        let_go.set()
        await asyncio.sleep(0)

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert "ignored its cancellation" in caplog.text


def test_what_an_async_function_raises_is_a_failure_and_its_own_cancellation_too() -> None:
    async def fail(sample: Sample) -> float:
        if sample.member:
            raise asyncio.CancelledError
        raise LookupError("no verdict")

    outcomes = score([make_sample(0), make_sample(1)], fail)
    assert values(outcomes) == [FailureReason.RAISED] * 2
    assert "LookupError: no verdict" in failure(outcomes[0]).text


@pytest.mark.parametrize("deed", ["raise", "exit", "raise_past_exception"])
def test_what_a_plain_function_does_in_the_loop_is_a_failure(deed: str) -> None:
    (outcome,) = score([make_sample(do=deed)], in_loop=True)
    assert failure(outcome).reason is FailureReason.RAISED
    assert "reward_functions.py:" in failure(outcome).text.partition("\n")[0]


def test_closing_ends_async_rewards_with_an_outcome_each() -> None:
    async def wait(sample: Sample) -> float:
        await asyncio.sleep(600)
        return 1.0

    async def run() -> None:
        async with running(wait, timeout_s=600) as runner:
            scores = [asyncio.create_task(runner.score([make_sample(), make_sample()])) for _ in range(3)]
            await asyncio.sleep(0.05)
            await runner.aclose()
            assert [values(await each) for each in scores] == [[FailureReason.CLOSED] * 2] * 3
            assert values(await runner.score([make_sample()])) == [FailureReason.CLOSED]

    asyncio.run(run())


def test_cancelling_a_score_cancels_its_rewards() -> None:
    async def run() -> None:
        ended = asyncio.Event()

        async def wait(sample: Sample) -> float:
            try:
                await asyncio.sleep(600)
            finally:
                ended.set()
            return 1.0

        async with running(wait) as runner:
            doomed = asyncio.create_task(runner.score([make_sample()]))
            await asyncio.sleep(0.02)
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            assert ended.is_set()
            assert runner.statistics().num_in_progress == 0

    asyncio.run(run())


def test_an_async_function_that_exits_fails_its_sample_alone() -> None:
    async def leave(sample: Sample) -> float:
        raise SystemExit(3)

    (outcome,) = score([make_sample()], leave)
    assert failure(outcome).reason is FailureReason.RAISED
    assert failure(outcome).text.startswith("SystemExit: 3 (")
