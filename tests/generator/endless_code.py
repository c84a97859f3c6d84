"""Generate functions that take turn after turn: one of them finds no end."""

from typing import Any

from fa_rollout.generator.rollouts.custom import GenerateContext
from fa_rollout.sample import Sample


async def generate(context: GenerateContext, sample: Sample, params: dict[str, Any]) -> Sample:
    turn = await context.generate(sample.prompt_ids, params)
    while sample.group == 1 and sample.member == 0:
        await context.generate(sample.prompt_ids, params)
    context.append_turn(sample, turn)
    return sample
