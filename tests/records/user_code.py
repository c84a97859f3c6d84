"""Rewards, filter and generate function of the recorded run: each kind of end has a prompt of its own."""

from typing import Any

from fa_rollout.generator.rollouts.custom import GenerateContext
from fa_rollout.sample import Sample

RAISES, USES_A_TOOL, IS_FILTERED = 3, 5, 7
"""Rows of the data."""
TOOL_OUTPUT = "tool 42"


def reward(sample: Sample) -> dict[str, float]:
    length = len(sample.response_ids) / 64
    even = float(len(sample.response_ids) % 2 == 0)
    return {"total": (length + even) / 2, "length": length, "even": even}


def keep(samples: list[Sample]) -> bool:
    return samples[0].prompt_index != IS_FILTERED


async def generate(context: GenerateContext, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if sample.prompt_index == RAISES:
        raise ValueError("this prompt cannot be answered")
    context.append_turn(sample, await context.generate(sample.prompt_ids, sampling_params))
    if sample.prompt_index == USES_A_TOOL:
        context.append_tool(sample, context.encode(TOOL_OUTPUT))
        context.append_turn(sample, await context.generate(context.ids(sample), sampling_params))
    return sample
