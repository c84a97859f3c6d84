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
_SHOWN = [
    {"role": "user", "content": "6 + 8"},
    {"role": "assistant", "content": "14"},
    {"role": "user", "content": "4 + 3"},
    {"role": "assistant", "content": "7"},
]


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
    """Chats that show two sums and ask for a third, and its value as label."""
    randomness = random.Random(seed)
    rows = []
    for _ in range(num_prompts):
        left, right = randomness.randint(1, 9), randomness.randint(1, 9)
        question = {"role": "user", "content": f"{left} + {right}"}
        rows.append({"prompt": [*_SHOWN, question], "label": left + right})
    return rows


def arithmetic_reward(sample: Sample) -> float:
    """1 for the right number and nothing else, half of it when it ends a longer reply, else 0."""
    numbers = re.findall(r"-?\d+", sample.response)
    if not numbers or int(numbers[-1]) != sample.label:
        return 0.0
    return 1.0 if sample.response.strip().rstrip(".") == numbers[-1] else 0.5
