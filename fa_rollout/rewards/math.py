"""Rewards for mathematical answers: 1.0 if the completion's answer equals the label, else 0.0.

`math-verify` parses and compares; an answer that it cannot parse, or cannot compare within five seconds, is
wrong. If the label cannot be parsed, the function raises and the sample fails. The time limit uses
`signal.alarm` and needs a main thread, as reward workers have.

Name one of them as `reward.function`, for example `"fa_rollout.rewards.math.boxed_answer_reward"`.
"""

import math
from decimal import Decimal
from functools import lru_cache
from typing import Any

from fa_rollout.sample import Sample

try:
    import math_verify
except ImportError as error:
    raise ImportError(f"math rewards need math-verify ({error}): pip install 'fa-rollout[math]'") from error

_MAX_ANSWER_CHARS = 2000


def boxed_answer_reward(sample: Sample) -> float:
    r"""Compare the last `\boxed{...}` of the response with the label; without a box the reward is 0.0."""
    gold, start = _gold(sample.label), sample.response.rfind("\\boxed")
    return 0.0 if start < 0 else _compare(gold, sample.response[start:])


def final_answer_reward(sample: Sample) -> float:
    r"""Compare the last answer (boxed, else LaTeX, else a plain expression) with the label."""
    start = sample.response.rfind("\\boxed")
    return _compare(_gold(sample.label), sample.response[start if start >= 0 else -_MAX_ANSWER_CHARS :])


def _compare(gold: list[Any], answer: str) -> float:
    return float(math_verify.verify(gold, math_verify.parse(answer[:_MAX_ANSWER_CHARS])))


def _gold(label: Any) -> list[Any]:
    """The parsed label. `None` and `True` are refused: they would parse as a product of their letters."""
    if isinstance(label, str):
        return _parsed_label(label)
    if isinstance(label, int | float | Decimal) and not isinstance(label, bool) and math.isfinite(label):
        return _parsed_label(f"{Decimal(str(label)):f}")
    raise ValueError(f"a label must be text or a number, found {label!r:.100}: see data.label_key")


@lru_cache(maxsize=1024)
def _parsed_label(label: str) -> list[Any]:
    """Parse a label: the answer alone, or a worked solution that ends in `#### answer` or in a box."""
    text = label.rpartition("####")[2].strip()
    if "\\boxed" not in text and not text.startswith("$"):
        text = f"\\boxed{{{text}}}"
    parsed: list[Any] = math_verify.parse(text, raise_on_error=True)
    if not parsed:
        raise ValueError(f"a label must be a mathematical answer, found {label!r}")
    return parsed
