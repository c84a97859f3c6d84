"""A call of user code ends once, by its result or by one failure that names the line."""

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fa_rollout.process.own_threads import NUM_USER_THREADS, in_thread
from fa_rollout.user_code.call import run
from fa_rollout.user_code.deadline import Deadline
from fa_rollout.user_code.failure import UserCodeFailed, UserCodeTimedOut
from fa_rollout.user_code.loop import HardenedLoop


def in_loop(work: Awaitable[Any]) -> Any:
    loop = HardenedLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(loop.finish())
        loop.close()


async def tool() -> None:
    await asyncio.Event().wait()


async def pieces() -> Any:
    await tool()
    yield 1


async def by_a_generator() -> None:
    async for _ in pieces():
        pass


async def by_a_task_group() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tool())


async def by_gathering() -> None:
    await asyncio.gather(asyncio.sleep(0), tool())


async def by_wait_for() -> None:
    await asyncio.wait_for(tool(), 60.0)


async def by_waiting() -> None:
    await asyncio.wait({asyncio.create_task(tool())})


@pytest.mark.parametrize(
    "function", [tool, by_a_generator, by_a_task_group, by_gathering, by_wait_for, by_waiting]
)
def test_a_call_that_is_late_names_the_innermost_line_through_whatever_it_waits(
    function: Callable[[], Awaitable[None]],
) -> None:
    with pytest.raises(
        UserCodeTimedOut, match=r"^generate: timeout: the rule; .*test_call.py:\d+ in tool for "
    ):
        in_loop(run("generate", function, function=function, deadline=Deadline(0.1, "the rule")))


def test_the_time_in_which_engines_work_does_not_count_and_an_answer_begins_it_anew() -> None:
    deadline = Deadline(0.2, "the rule")

    async def turns() -> str:
        for _ in range(3):
            await asyncio.sleep(0.1)
            with deadline.paused():
                await asyncio.sleep(0.4)
            deadline.renew()
        return "done"

    assert in_loop(run("generate", turns, deadline=deadline)) == "done"


def test_a_cancelled_caller_ends_the_call_and_is_cancelled() -> None:
    ended = []

    async def user() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def work() -> None:
        caller = asyncio.create_task(run("generate", user))
        await asyncio.sleep(0.01)
        caller.cancel()
        await asyncio.wait({caller})
        assert caller.cancelled()

    in_loop(work())
    assert ended == [True]


def test_an_error_whose_text_cannot_be_shown_is_a_failure_too() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError

    async def user() -> None:
        raise Odd

    with pytest.raises(UserCodeFailed, match=r"^reward: Odd: \(its __str__ failed\) \(.* in user\)"):
        in_loop(run("reward", user))


def test_our_own_work_waits_for_no_thread_of_user_code() -> None:
    release = threading.Event()

    async def work() -> None:
        calls = [asyncio.create_task(asyncio.to_thread(release.wait)) for _ in range(NUM_USER_THREADS + 1)]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(20.0):
                assert await in_thread(functools.partial(pow, 2), 5) == 32
                assert await asyncio.get_running_loop().getaddrinfo("localhost", 80)
        finally:
            release.set()
            await asyncio.wait(calls)

    in_loop(work())


def test_a_loop_ends_though_a_task_of_user_code_ignores_it() -> None:
    kept: list[Any] = []

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                continue

    async def user() -> None:
        kept.append(asyncio.create_task(stubborn()))
        await asyncio.sleep(0)

    in_loop(run("generate", user))
