"""User code that hangs once in each of its kinds; which group does how is told by its number."""

import asyncio
import time
from typing import Any

from fa_rollout.generator.rollouts.custom import GenerateContext
from fa_rollout.sample import Sample


async def generate(context: GenerateContext, sample: Sample, params: dict[str, Any]) -> Sample:
    context.append_turn(sample, await context.generate(sample.prompt_ids, params))
    if sample.member == 0:
        await _hang(context, sample)
    return sample


async def _hang(context: GenerateContext, sample: Sample) -> None:
    match sample.group:
        case 0:
            await _wait_for_a_tool()
        case 1:
            _block()
        case 2:
            await asyncio.to_thread(time.sleep, 600)
        case 3:
            while True:
                await context.generate(context.ids(sample), {"max_new_tokens": 0})
        case 4:
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    continue


def _block() -> None:
    time.sleep(600)


async def _wait_for_a_tool() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_tool())


async def _tool() -> None:
    await asyncio.Event().wait()


def keep(samples: list[Sample]) -> bool:
    while samples[0].group == 5:
        pass
    return True


def reward(sample: Sample) -> float:
    if sample.group == 6:
        time.sleep(600)
    return 1.0


async def judge(sample: Sample) -> float:
    if sample.group == 0:
        await _tool()
    if sample.group == 1:
        _block()
    return 1.0
