"""User code that does, by the numbers of its sample, whatever user code can do to a task and its loop."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

from fa_rollout.generator.rollouts.custom import GenerateContext
from fa_rollout.sample import Sample

Deed = Callable[[], Awaitable[Any]]
TASKS: list["asyncio.Future[Any]"] = []
"""Left behind."""
NUM_FINE = 16
"""Beside the deeds, as many calls in a row do nothing."""


class OwnEnd(BaseException):
    """Of a library that wants its exception to be caught by nobody."""


def raising(error: BaseException) -> Deed:
    async def deed() -> None:
        raise error

    return deed


async def cancels_itself_and_waits() -> None:
    own(asyncio.current_task()).cancel()
    await asyncio.sleep(1.0)


async def cancels_itself_and_returns() -> None:
    own(asyncio.current_task()).cancel()


async def is_cancelled_by_a_child() -> None:
    parent = own(asyncio.current_task())

    async def child() -> None:
        parent.cancel()

    await asyncio.gather(child(), asyncio.sleep(1.0))


async def leaks_a_cancellation() -> None:
    task = asyncio.create_task(asyncio.sleep(60.0))
    task.cancel()
    await task


async def never_returns() -> None:
    await asyncio.gather(asyncio.Event().wait(), asyncio.sleep(1.0))


async def ignores_its_end() -> None:
    for _ in range(3):
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            continue


async def cancels_everybody() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


async def exits_in_a_child() -> None:
    await asyncio.gather(raising(SystemExit(3))(), asyncio.sleep(1.0))


async def exits_in_a_callback() -> None:
    def leave() -> None:
        raise SystemExit(4)

    asyncio.get_running_loop().call_soon(leave)
    await asyncio.sleep(0.1)


async def returns_nothing() -> str:
    return "nothing"


async def leaves_a_task_behind() -> None:
    TASKS.append(asyncio.create_task(never_returns()))


DEEDS: list[Deed] = [
    raising(ValueError("a mistake")),
    raising(GeneratorExit()),
    raising(SystemExit(2)),
    raising(KeyboardInterrupt()),
    raising(asyncio.CancelledError()),
    raising(OwnEnd()),
    raising(BaseExceptionGroup("several", [OwnEnd(), SystemExit(5)])),
    cancels_itself_and_waits,
    cancels_itself_and_returns,
    is_cancelled_by_a_child,
    leaks_a_cancellation,
    never_returns,
    ignores_its_end,
    cancels_everybody,
    exits_in_a_child,
    exits_in_a_callback,
    returns_nothing,
    leaves_a_task_behind,
]


def own(task: "asyncio.Task[Any] | None") -> "asyncio.Task[Any]":
    assert task is not None
    return task


def deed_of(sample: Sample, kind: str) -> Deed | None:
    text = f"{kind} {sample.group} {sample.member} {sample.attempt}"
    number = zlib.crc32(text.encode()) % (len(DEEDS) + NUM_FINE)
    return DEEDS[number] if number < len(DEEDS) else None


async def generate(context: GenerateContext, sample: Sample, params: dict[str, Any]) -> Any:
    context.append_turn(sample, await context.generate(sample.prompt_ids, params))
    deed = deed_of(sample, "generate")
    if deed is leaves_a_task_behind:
        TASKS.append(asyncio.ensure_future(context.generate(context.ids(sample), {"max_new_tokens": 3})))
    return (await deed() if deed else None) or sample


async def reward(sample: Sample) -> Any:
    await asyncio.sleep(0.1)
    deed = deed_of(sample, "reward")
    return (await deed() if deed else None) or float(sample.member)


def keep(samples: list[Sample]) -> Any:
    match samples[0].group % 9:
        case 3:
            own(asyncio.current_task()).cancel()
        case 5:
            raise SystemExit(6)
        case 7:
            return None
    return True
