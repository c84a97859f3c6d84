"""Math rewards: right is 1.0, wrong or missing is 0.0, and a label that is no answer is no reward."""

import pytest
from reward_kit import failure, make_sample, score, values

from fa_rollout.rewards.math import boxed_answer_reward, final_answer_reward
from fa_rollout.rewards.outcomes import FailureReason


@pytest.mark.parametrize(
    ("response", "label", "boxed", "final"),
    [
        (r"so \boxed{42}", 42, 1.0, 1.0),
        (r"so \boxed{42.0}", "42", 1.0, 1.0),
        (r"\boxed{\frac{1}{2}}", 0.5, 1.0, 1.0),
        (r"\boxed{10^{20}}", 1e20, 1.0, 1.0),
        (r"\boxed{0.00001}", 1e-05, 1.0, 1.0),
        (r"\boxed{1/2}", r"\frac12", 1.0, 1.0),
        (r"\boxed{1} no: \boxed{2}", "2", 1.0, 1.0),
        (r"\boxed{x + 1}", "1 + x", 1.0, 1.0),
        (r"\boxed{41}", "42", 0.0, 0.0),
        (r"\boxed{", "42", 0.0, 0.0),
        ("it is 7", "7", 0.0, 1.0),
        (r"The answer is $\frac{3}{4}$.", "0.75", 0.0, 1.0),
        ("I do not know", "7", 0.0, 0.0),
        ("", "7", 0.0, 0.0),
        (r"\boxed{12}", "There are 5 + 7 = 12 of them.\n#### 12", 1.0, 1.0),
        (r"\boxed{12}", r"and so $\boxed{12}$", 1.0, 1.0),
    ],
)
def test_the_answer_is_compared_as_mathematics(
    response: str, label: object, boxed: float, final: float
) -> None:
    sample = make_sample(response=response, label=label)
    assert (boxed_answer_reward(sample), final_answer_reward(sample)) == (boxed, final)


def test_in_a_worker_its_alarms_work_and_a_label_that_is_no_answer_is_a_failure() -> None:
    samples = [make_sample(response=r"\boxed{3}", label=label) for label in ("3", "", 3)]
    outcomes = score(samples, "fa_rollout.rewards.math.boxed_answer_reward")
    assert values(outcomes) == [1.0, FailureReason.RAISED, 1.0]
    assert "a label must be a mathematical answer" in failure(outcomes[1]).text


@pytest.mark.parametrize("label", [None, True, float("nan"), {"answer": "4"}, ["4"]])
def test_a_label_that_is_neither_text_nor_a_number_is_no_answer(label: object) -> None:
    for reward in (boxed_answer_reward, final_answer_reward):
        with pytest.raises(ValueError, match=r"text or a number.*data\.label_key"):
            reward(make_sample(response=r"\boxed{4}", label=label))


def test_a_missing_label_is_told_although_there_is_no_box() -> None:
    with pytest.raises(ValueError, match=r"data\.label_key"):
        boxed_answer_reward(make_sample(response="no box", label=None))
