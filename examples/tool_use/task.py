"""What does `c` cost? The model must ask the price list: it writes `C`, reads `3`, and answers `3`."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from fa_rollout.generator.rollouts.custom import GenerateContext
from fa_rollout.sample import Sample


@cache
def prices() -> dict[str, str]:
    """What the tool knows, and the model does not."""
    return json.loads(Path("work/prices.json").read_text())


async def generate(context: GenerateContext, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """A turn that calls the tool, the tool's output, and a turn that answers; without a call, one turn."""
    turn = await context.generate(sample.prompt_ids, sampling_params)
    context.append_turn(sample, turn)
    asked = context.decode(turn.output_ids)
    if asked in prices():
        # A real tool takes its time: `await` it, and all other samples go on meanwhile.
        context.append_tool(sample, context.encode(prices()[asked]))
        turn = await context.generate(context.ids(sample), sampling_params)
        context.append_turn(sample, turn)
        sample.metadata |= {"asked": asked, "answer": context.decode(turn.output_ids)}
    return sample


def reward(sample: Sample) -> dict[str, float]:
    """Half for asking after the right article, half for the right answer; `reward.key` names the sum."""
    asked = sample.metadata.get("asked") == str(sample.prompt).upper()
    answered = asked and sample.metadata["answer"] == sample.label
    return {"asked": 0.5 * asked, "answered": 0.5 * answered, "score": 0.5 * asked + 0.5 * answered}
