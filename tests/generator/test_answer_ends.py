"""Whether an answer is over follows from its ids and its parameters, however many requests made it."""

from typing import Any

import numpy as np
import pytest

from fa_rollout.generator.turns.ending import AnswerEnding, Ends
from fa_rollout.generator.turns.sampling import can_be_continued, refusal
from fa_rollout.sample import FinishReason

EOS, OTHER_EOS, STOP_ID = 90, 91, 7


def letters(ids: np.ndarray) -> str:
    """A text for token ids: one letter each."""
    return "".join(chr(ord("A") + token) for token in ids.tolist())


def ids_of(text: str) -> np.ndarray:
    return np.array([ord(letter) - ord("A") for letter in text], np.int32)


def end(ids: Any, *, seam: int = 0, **params: Any) -> AnswerEnding | None:
    ends = Ends([EOS, OTHER_EOS], letters)
    return ends.find(np.asarray(ids, np.int32), {"max_new_tokens": 100} | params, seam=seam)


def stop(num_tokens: int) -> AnswerEnding:
    return AnswerEnding(num_tokens, FinishReason.STOP)


def length(num_tokens: int) -> AnswerEnding:
    return AnswerEnding(num_tokens, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("ids", "params", "expected"),
    [
        ([5, 6], {}, None),
        ([5, 6, EOS], {}, stop(3)),
        ([5, 6, OTHER_EOS], {}, stop(3)),
        ([5, EOS, 6, EOS], {}, stop(2)),
        ([5, STOP_ID], {"stop_token_ids": [STOP_ID]}, stop(2)),
        ([5, STOP_ID, EOS], {"stop_token_ids": None}, stop(3)),
        ([5, EOS], {"ignore_eos": True}, None),
        ([5, STOP_ID], {"ignore_eos": True, "stop_token_ids": [STOP_ID]}, None),
        ([5, EOS], {"ignore_eos": True, "json_schema": "{}"}, stop(2)),
        ([5, 6], {"json_schema": "{}"}, None),
        ([5, 6], {"max_new_tokens": 2}, length(2)),
        ([5, 6, 8], {"max_new_tokens": 2}, length(2)),
        ([5, 6, EOS], {"max_new_tokens": 2}, length(2)),
        ([5, EOS], {"max_new_tokens": 2}, stop(2)),
        ([], {"max_new_tokens": -3}, length(0)),
        ([], {}, None),
        ([5, EOS], {"min_new_tokens": 4}, stop(2)),
    ],
    ids=str,
)
def test_tokens_and_the_budget_end_an_answer(
    ids: list[int], params: dict[str, Any], expected: AnswerEnding | None
) -> None:
    assert end(ids, **params) == expected


@pytest.mark.parametrize(
    ("text", "seam", "params", "expected"),
    [
        ("abcSTOPxyz", 5, {"stop": ["STOP"]}, stop(7)),
        ("abcSTOPxyz", 4, {"stop": "STOP"}, stop(7)),
        ("abcSTOPxyz", 6, {"stop": ["never", "STOP"]}, stop(7)),
        ("abcSTOPxyz", 0, {"stop": ["STOP"], "min_new_tokens": 9}, stop(7)),
        ("abcSTOP", 6, {"stop": ["", "STOP"]}, stop(7)),
        ("abcSTO", 5, {"stop": ["STOP"]}, None),
        ("abcSTOP", 5, {"stop": ["STOP"], "ignore_eos": True}, stop(7)),
        ("abcSTOPxyz", 5, {"stop": ["STOP"], "max_new_tokens": 6}, length(6)),
        ("abxyxyc", 4, {"stop_regex": "(xy){2}"}, stop(6)),
        ("abxyxyc", 4, {"stop_regex": ["z+", "y.*c"]}, stop(7)),
        ("abc", 0, {"stop_regex": [""]}, None),
    ],
)
def test_a_text_ends_an_answer_with_the_token_that_completes_it(
    text: str, seam: int, params: dict[str, Any], expected: AnswerEnding | None
) -> None:
    assert end(ids_of(text), seam=seam, **params) == expected


def test_a_stop_text_of_bytes_is_found_where_several_tokens_make_a_character() -> None:
    encoded = np.frombuffer("x → ".encode() * 2, np.uint8).astype(np.int32)
    ends = Ends(decode=lambda ids: bytes(ids.tolist()).decode(errors="replace"))
    half = len(encoded) // 2
    for seam in range(half + 3, half + 5):  # inside of the second arrow, where the first is known to be none
        found = ends.find(encoded[half:], {"max_new_tokens": 99, "stop": ["→"]}, seam=seam - half)
        assert found == stop(5)


def test_without_a_decoder_texts_are_left_to_the_engines() -> None:
    assert Ends([EOS]).find(ids_of("STOP"), {"max_new_tokens": 9, "stop": ["STOP"]}) is None


@pytest.mark.parametrize(
    ("params", "options", "can"),
    [
        ({"temperature": 0.5, "stop": ["x"], "sampling_seed": 3, "min_new_tokens": 4}, {}, True),
        ({"frequency_penalty": 0.0, "presence_penalty": None, "repetition_penalty": 1}, {}, True),
        ({"frequency_penalty": -0.1}, {}, False),
        ({"presence_penalty": 1}, {}, False),
        ({"repetition_penalty": 1.1}, {}, False),
        ({"structural_tag": "{}"}, {}, False),
        ({"custom_params": {"a": 1}}, {}, True),
        ({"custom_params": {"a": 1}}, {"custom_logit_processor": "..."}, False),
        ({"logit_bias": {"1": 2.0}}, {"return_routed_experts": True}, True),
    ],
    ids=str,
)
def test_answers_whose_parameters_count_tokens_or_bind_a_form_cannot_be_continued(
    params: dict[str, Any], options: dict[str, Any], can: bool
) -> None:
    assert can_be_continued(params, options) is can


def test_more_than_one_answer_a_request_is_refused() -> None:
    assert refusal({"n": 1, "beam_width": None}) is None
    assert (refusal({"n": 2}) or "").startswith("n: a request must ask for one answer, found n = 2")
