"""A failure is never a number, and a number is what the user returned."""

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from fa_rollout.rewards.outcomes import FailureReason, RewardFailed, Scored, read, read_group


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (1.5, 1.5),
        (2, 2.0),
        (True, 1.0),
        (False, 0.0),
        (np.float16(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
        (np.array([0.25]), 0.25),
        (torch.tensor(0.75), 0.75),
        (torch.tensor([[2]]), 2.0),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
    ],
)
def test_a_number_of_any_kind_is_a_reward(result: Any, value: float) -> None:
    outcome = read(result, key=None, num_tokens=0)
    assert outcome == Scored(value=value)
    assert type(outcome.value) is float


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "NoneType"),
        (float("nan"), "finite"),
        (float("inf"), "finite"),
        (np.float32("-inf"), "finite"),
        (1e39, "float32"),
        (10**400, "must be one number"),
        ("1.0", "str '1.0'"),
        (np.str_("1.0"), "str"),
        (b"1", "bytes"),
        (1 + 2j, "complex"),
        ([1.0], "list"),
        ((), "tuple"),
        (np.array([1.0, 2.0]), "one number"),
        (np.array([]), "one number"),
        (torch.tensor([1.0, 2.0]), "one number"),
        (np.array([None]), "NoneType"),
        (object(), "object"),
        ({"score": 1.0}, r"reward\.key to the entry.*'score'"),
    ],
)
def test_anything_else_is_a_failure_that_names_what_was_found(result: Any, says: str) -> None:
    outcome = read(result, key=None, num_tokens=0)
    assert isinstance(outcome, RewardFailed)
    assert outcome.reason is FailureReason.BAD_VALUE
    assert re.search(says, outcome.text), outcome.text


def test_of_a_dict_the_key_is_the_reward_and_other_numbers_are_its_parts() -> None:
    result = {"acc": np.bool_(True), "length": 12, "text": "no number", "nan": float("nan"), 3: 0.5}
    assert read(result, key="acc", num_tokens=0) == Scored(value=1.0, parts={"length": 12.0, "3": 0.5})


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ({"score": None}, "NoneType"),
        ({"score": float("nan")}, "finite"),
        ({"acc": 1.0, "x": 2}, r"'score' is missing in the dict.*'acc', 'x'"),
        (1.0, r"with reward\.key = 'score', the function must return a dict, found float"),
    ],
)
def test_a_dict_must_hold_a_number_under_the_key(result: Any, says: str) -> None:
    outcome = read(result, key="score", num_tokens=0)
    assert isinstance(outcome, RewardFailed)
    assert re.search(says, outcome.text), outcome.text


def test_token_rewards_are_kept_as_float32_one_a_response_token() -> None:
    for given in ([0, 0.5, 1], np.array([0, 0.5, 1]), torch.tensor([0, 0.5, 1])):
        outcome = read({"score": 1, "token_rewards": given}, key="score", num_tokens=3)
        assert isinstance(outcome, Scored)
        assert outcome.token_rewards is not None
        assert outcome.token_rewards.dtype == np.float32
        assert outcome.token_rewards.tolist() == [0, 0.5, 1]
        assert outcome.parts == {}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([1.0], r"3, found \(1,\)"),
        ([[1, 2, 3]], r"\(1, 3\)"),
        ([1, 2, float("nan")], "finite"),
        ("abc", "list of numbers"),
    ],
)
def test_token_rewards_of_another_shape_fail_and_both_lengths_are_named(given: Any, says: str) -> None:
    outcome = read({"score": 1, "token_rewards": given}, key="score", num_tokens=3)
    assert isinstance(outcome, RewardFailed)
    assert re.search(says, outcome.text), outcome.text


@pytest.mark.parametrize("result", [[1, 2.0], (1, 2), np.array([1, 2]), torch.tensor([1.0, 2.0])])
def test_a_group_reward_is_a_list_of_one_reward_a_sample(result: Any) -> None:
    assert read_group(result, key=None, nums_tokens=[3, 3]) == [Scored(value=1.0), Scored(value=2.0)]


def test_one_bad_reward_of_a_group_fails_its_own_sample_alone() -> None:
    outcomes = read_group([1.0, None, {"s": 1}], key=None, nums_tokens=[1, 1, 1])
    assert isinstance(outcomes, list)
    assert [type(outcome) for outcome in outcomes] == [Scored, RewardFailed, RewardFailed]


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ([1.0], "2 samples, found 1"),
        ([1.0, 2.0, 3.0], "2 samples, found 3"),
        (np.ones((2, 2)), "list of 2 rewards"),
        (1.0, "list of 2 rewards, found float"),
        ("ab", "list of 2 rewards, found str"),
        ({"a": 1, "b": 2}, "list of 2 rewards, found dict"),
        (None, "list of 2 rewards"),
    ],
)
def test_a_group_reward_of_another_shape_fails_the_group_and_both_lengths_are_named(
    result: Any, says: str
) -> None:
    outcome = read_group(result, key=None, nums_tokens=[3, 3])
    assert isinstance(outcome, RewardFailed)
    assert re.search(says, outcome.text), outcome.text
