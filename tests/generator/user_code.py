"""Rewards, filters and generate functions as a user would write them."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from fa_rollout.generator.rollouts.custom import GenerateContext
from fa_rollout.sample import Sample


def response_length(sample: Sample) -> float:
    return float(len(sample.response_ids))


def fails_on_odd_prompts(sample: Sample) -> Any:
    """Prompt 1 raises, 3 gives None, 5 NaN, 7 text; even ones are scored."""
    match sample.prompt_index:
        case 1:
            raise ValueError("no verdict")
        case 3:
            return None
        case 5:
            return float("nan")
        case 7:
            return "1.0"
        case _:
            return 1.0


def spinning_ranks(samples: list[Sample]) -> list[float]:
    """Holds the interpreter for a second and a half."""
    end_s = time.monotonic() + 1.5
    while time.monotonic() < end_s:
        pass
    return [float(sample.member) for sample in samples]


def never_ends(sample: Sample) -> float:
    """Leaves its process id in a file, so that a test can see it gone."""
    Path(os.environ["TEST_PIDS"], str(os.getpid())).touch()
    time.sleep(600)
    return 0.0


def every_third(samples: list[Sample]) -> bool:
    """Only every third group passes; group 16 meets the filter's own mistake."""
    if samples[0].group == 16:
        raise KeyError("the filter's own mistake")
    return samples[0].group % 3 == 0


async def by_prompt(context: GenerateContext, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    """Each prompt has its own way of being sampled."""
    functions = (
        three_turns,
        encodes_again,
        two_branches,
        raises_in_generate,
        forgets_to_return,
        without_room,
    )
    return await functions[sample.prompt_index](context, sample, sampling_params)


async def three_turns(context: GenerateContext, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Two tool calls between three turns of at most five tokens."""
    params = sampling_params | {"max_new_tokens": 5}
    for tool_output in ("tool a", "tool b", None):
        turn = await context.generate(context.ids(sample), params)
        context.append_turn(sample, turn)
        if tool_output is not None:
            context.append_tool(sample, context.encode(tool_output))
    return sample


async def encodes_again(context: GenerateContext, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The mistake: text of a turn goes back through the tokenizer."""
    turn = await context.generate(sample.prompt_ids, sampling_params)
    context.append_turn(sample, turn)
    again = context.encode(str(sample.prompt) + context.decode(turn.output_ids) + " and")
    context.append_turn(sample, await context.generate(again, sampling_params))
    return sample


async def two_branches(
    context: GenerateContext, sample: Sample, sampling_params: dict[str, Any]
) -> list[Sample]:
    """One execution, two training samples; only the last is scored by the reward function."""
    other = Sample(
        **{
            name: getattr(sample, name)
            for name in (
                "group",
                "member",
                "attempt",
                "epoch",
                "prompt_index",
                "prompt",
                "label",
                "prompt_ids",
            )
        },
        metadata={"branch": "other"},
    )
    turns = await asyncio.gather(
        *(context.generate(sample.prompt_ids, sampling_params | {"max_new_tokens": n}) for n in (3, 7))
    )
    for branch, turn in zip((other, sample), turns, strict=True):
        context.append_turn(branch, turn)
    return [other, sample]


async def raises_in_generate(
    context: GenerateContext, sample: Sample, sampling_params: dict[str, Any]
) -> Sample:
    raise KeyError("the user's own mistake")


async def forgets_to_return(
    context: GenerateContext, sample: Sample, sampling_params: dict[str, Any]
) -> None:
    context.append_turn(sample, await context.generate(sample.prompt_ids, sampling_params))


async def without_room(context: GenerateContext, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """A conversation whose budget is used up after the first turn."""
    room = 10
    while sample.finish_reason != "length":
        turn = await context.generate(context.ids(sample), sampling_params | {"max_new_tokens": room})
        context.append_turn(sample, turn)
        room -= len(turn.output_ids)
        context.append_tool(sample, context.encode("go on"))
        room -= 5
    return sample


async def with_arrays(context: GenerateContext, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Attaches an array of every kind."""
    context.append_turn(sample, await context.generate(sample.prompt_ids, sampling_params))
    num_tokens = len(sample.prompt_ids) + len(sample.response_ids)
    sample.extras["teacher"] = np.full(num_tokens, 0.5)
    sample.extras["weight"] = np.array(sample.member + 0.25)
    if sample.member:
        sample.extras["pixels"] = np.array([[7, sample.member]] * sample.member)
    return sample


def reward_by_token(sample: Sample) -> dict[str, Any]:
    """One for the whole, and as many for its tokens."""
    return {"reward": 1.0, "token_rewards": list(range(len(sample.response_ids)))}


async def excludes_members(
    context: GenerateContext, sample: Sample, sampling_params: dict[str, Any]
) -> Sample:
    """Takes the second member of each group out of it, and all members of every other group."""
    context.append_turn(sample, await context.generate(sample.prompt_ids, sampling_params))
    if sample.member == 1 or sample.group % 2:
        sample.loss_mask = np.zeros_like(sample.loss_mask)
    return sample


def never_sees_the_excluded(samples: list[Sample]) -> list[float]:
    assert len(samples) == 3
    return [float(sample.member) for sample in samples]


async def with_options(context: GenerateContext, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Two turns, of which the second asks for something more."""
    context.append_turn(sample, await context.generate(sample.prompt_ids, sampling_params))
    ids = context.ids(sample)
    context.append_turn(sample, await context.generate(ids, sampling_params, options={"extra_key": "mine"}))
    return sample


async def ends_itself(context: GenerateContext, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Each prompt ends, or is answered, in a way that no task and no message was made for."""
    turn = await context.generate(sample.prompt_ids, sampling_params)
    context.append_turn(sample, turn)
    match sample.prompt_index:
        case 0:
            raise asyncio.CancelledError
        case 1:
            sys.exit("a library's own usage message")
        case 2:
            task = asyncio.create_task(asyncio.sleep(60.0))
            task.cancel()
            await task
        case 3:
            raise ValueError("a lone surrogate: \ud800")
        case 4:
            raise ValueError("long" * (20 << 20))
        case 5:
            sample.metadata["itself"] = sample.metadata
        case 6:
            sample.reward = "1.0"  # type: ignore[assignment]
        case 7:
            sample.reward = np.array([2.5])  # type: ignore[assignment]
    return sample


def exits(samples: list[Sample]) -> bool:
    raise SystemExit(samples[0].group)
