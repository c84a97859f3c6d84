"""What the demo's models learn: prompts, and rewards that the generator calls.

In: a seed. Out: rows of prompts, and a reward between 0 and 1 for a completion. Invariant: rewards depend on
the completion alone, so a run's curve can be made again from its data.
"""

import random
import re
from typing import Any

from fa_rollout.sample import Sample

CHARACTERS = "0123456789="
NUM_DIGITS = 4


def sorting_prompts(num_prompts: int, seed: int) -> list[dict[str, Any]]:
    """Rows such as `{"prompt": "8352=", "label": "2358"}`."""
    randomness = random.Random(seed)
    rows = []
    for _ in range(num_prompts):
        digits = [randomness.choice("0123456789") for _ in range(NUM_DIGITS)]
        rows.append({"prompt": "".join(digits) + "=", "label": "".join(sorted(digits))})
    return rows


def sorting_reward(sample: Sample) -> float:
    """Share of places that hold the right digit; one more place is for stopping right after them."""
    num_right = sum(got == wanted for got, wanted in zip(sample.response, str(sample.label), strict=False))
    has_stopped = sample.finish_reason == "stop" and len(sample.response) == NUM_DIGITS
    return (num_right + has_stopped) / (NUM_DIGITS + 1)


def arithmetic_prompts(num_prompts: int, seed: int) -> list[dict[str, Any]]:
    """Chat messages that ask for a sum, a difference or a product, and the answer as label."""
    randomness = random.Random(seed)
    rows = []
    for _ in range(num_prompts):
        operator = randomness.choice("+-*")
        highest = 12 if operator == "*" else 60
        left, right = randomness.randint(2, highest), randomness.randint(2, highest)
        answer = {"+": left + right, "-": left - right, "*": left * right}[operator]
        question = f"What is {left} {operator} {right}? Reply with the number only."
        rows.append({"prompt": [{"role": "user", "content": question}], "label": answer})
    return rows


def arithmetic_reward(sample: Sample) -> float:
    """1 for the right number and nothing else, half of it when it ends a longer reply, else 0."""
    numbers = re.findall(r"-?\d+", sample.response)
    if not numbers or int(numbers[-1]) != sample.label:
        return 0.0
    return 1.0 if sample.response.strip().rstrip(".") == numbers[-1] else 0.5
