"""Rewards for mathematical answers: 1.0 where the completion's answer equals the label, else 0.0.

`math-verify` parses and compares; an answer that it cannot parse, or not compare within five seconds, is
wrong. A label that cannot be parsed is no reward at all: the function raises, and the sample counts as
failed. The time limit is a `signal.alarm`, so these run on a main thread: reward workers have one.

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
    r"""The last `\boxed{...}` of the response against the label; no box is a wrong answer."""
    gold, start = _gold(sample.label), sample.response.rfind("\\boxed")
    return 0.0 if start < 0 else _compare(gold, sample.response[start:])


def final_answer_reward(sample: Sample) -> float:
    r"""The last answer of the response against the label: boxed, else in LaTeX, else a plain expression."""
    start = sample.response.rfind("\\boxed")
    return _compare(_gold(sample.label), sample.response[start if start >= 0 else -_MAX_ANSWER_CHARS :])


def _compare(gold: list[Any], answer: str) -> float:
    return float(math_verify.verify(gold, math_verify.parse(answer[:_MAX_ANSWER_CHARS])))


def _gold(label: Any) -> list[Any]:
    """A label as mathematics; `None` or `True` would be read as a product of its letters."""
    if isinstance(label, str):
        return _parsed_label(label)
    if isinstance(label, int | float | Decimal) and not isinstance(label, bool) and math.isfinite(label):
        return _parsed_label(f"{Decimal(str(label)):f}")
    raise ValueError(f"a label must be text or a number, found {label!r:.100}: see data.label_key")


@lru_cache(maxsize=1024)
def _parsed_label(label: str) -> list[Any]:
    """A label may be the answer alone, or a worked solution that ends in `#### answer` or in a box."""
    text = label.rpartition("####")[2].strip()
    if "\\boxed" not in text and not text.startswith("$"):
        text = f"\\boxed{{{text}}}"
    parsed: list[Any] = math_verify.parse(text, raise_on_error=True)
    if not parsed:
        raise ValueError(f"a label must be a mathematical answer, found {label!r}")
    return parsed
