"""A filter keeps, rejects with a reason, or fails; endless rejection ends the run and says why."""

from typing import Any

import numpy as np
import pytest

from fa_rollout.config import ConfigError
from fa_rollout.filters import (
    EndlessRejection,
    FilterOutcome,
    GroupFilter,
    RejectionBound,
    Verdict,
    default_bound,
    flat,
    zero_variance,
)
from fa_rollout.sample import Sample
from fa_rollout.user_code.failure import UserCodeFailed

KEPT = Verdict(outcome=FilterOutcome.KEPT)


def sample(reward: float | None) -> Sample:
    return Sample(
        group=0, member=0, attempt=1, epoch=0, prompt_index=0, prompt="p", label=None, metadata={},
        prompt_ids=np.arange(1, dtype=np.int32), reward=reward,
    )  # fmt: skip


def group(*rewards: float | None) -> list[Sample]:
    return [sample(reward) for reward in rewards]


def masked(reward: float | None) -> Sample:
    """A member of which no token is trained."""
    made = sample(reward)
    made.loss_mask = np.zeros(3, np.uint8)
    return made


def rejected(reason: str) -> Verdict:
    return Verdict(outcome=FilterOutcome.REJECTED, reason=reason)


def at_least_three(samples: list[Sample]) -> Any:
    return len(samples) >= 3


def numpy_answer(samples: list[Sample]) -> Any:
    return np.mean([sample.reward for sample in samples]) > 0.5


def forgets_to_answer(samples: list[Sample]) -> Any:
    """No return."""


def raises(samples: list[Sample]) -> Any:
    raise LookupError("no such thing")


not_a_function = 3


@pytest.mark.parametrize(
    ("samples", "verdict"),
    [
        (group(0.0, 1.0), KEPT),
        (group(0.1, 0.1, 0.2), KEPT),
        (group(1.0, 1.0, 1.0), rejected("all rewards are 1")),
        (group(0.1 + 0.2, 0.3), rejected("all rewards are 0.3")),
        (group(5.0), rejected("all rewards are 5")),
        (group(None, 1.0, None, 0.0), KEPT),
        (group(None, 1.0), rejected("all rewards are 1")),
        (group(None, None), rejected("no sample has a reward")),
        ([masked(0.0), *group(1.0, 1.0)], rejected("all rewards are 1")),
        ([masked(1.0), masked(0.0)], rejected("no sample has a reward")),
        ([group(0.0, 0.0), group(1.0)], KEPT),
        ([group(0.0, 0.0), group(0.0)], rejected("all rewards are 0")),
    ],
)
def test_zero_variance_keeps_groups_whose_rewards_differ_as_float32(
    samples: list[Any], verdict: Verdict
) -> None:
    assert zero_variance(samples) == GroupFilter.load("zero_variance")(samples) == verdict


def test_a_nested_group_reaches_a_users_filter_as_it_is_and_flat_lists_its_samples() -> None:
    nested = [group(0.0, 1.0), group(2.0)]
    seen = []
    assert GroupFilter("mine", lambda samples: seen.append(samples) or True)(nested) == KEPT
    assert seen == [nested]
    assert [each.reward for each in flat(nested)] == [0.0, 1.0, 2.0]


def test_a_users_filter_keeps_or_rejects_by_its_bool() -> None:
    keep = GroupFilter.load("test_filters.at_least_three")
    assert keep(group(1, 1, 1)) == KEPT
    assert keep(group(1, 1)) == rejected("test_filters.at_least_three returned False")
    assert GroupFilter.load("test_filters:numpy_answer")(group(1, 1)) == KEPT


@pytest.mark.parametrize(
    ("name", "says"), [("forgets_to_answer", "bool, found NoneType"), ("raises", "LookupError")]
)
def test_a_filter_that_fails_neither_keeps_nor_rejects(name: str, says: str) -> None:
    with pytest.raises((UserCodeFailed, LookupError)) as caught:
        GroupFilter.load(f"test_filters.{name}")(group(1))
    assert says in f"{caught.typename}: {caught.value}"


@pytest.mark.parametrize(
    "path", ["zero_varianc", "test_filters.nothing", "no_such.module", "test_filters.not_a_function"]
)
def test_a_filter_that_is_not_there_is_a_configuration_error(path: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.filter"):
        GroupFilter.load(path)


def test_endless_rejection_names_the_filter_the_groups_and_the_reasons_with_counts() -> None:
    bound = RejectionBound("zero_variance", 10)
    for _ in range(7):
        bound.record(rejected("all rewards are 0"))
    for _ in range(2):
        bound.record(rejected("all rewards are 1"))
    assert bound.num_in_a_row == 9
    with pytest.raises(
        EndlessRejection,
        match=r"'zero_variance'.* 10 groups in a row .7 x all rewards are 0; 3 x all rewards are 1",
    ):
        bound.record(rejected("all rewards are 1"))


def test_a_filter_that_passes_one_in_fifty_never_trips_the_default_bound() -> None:
    for num_prompts in (10, 10_000):
        bound = RejectionBound("mine", default_bound(num_prompts))
        for number in range(1, 5001):
            bound.record(KEPT if number % 50 == 0 else rejected("no"))
    assert [default_bound(n) for n in (1, 64, 500, 10**6)] == [64, 64, 500, 1000]
