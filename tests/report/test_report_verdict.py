"""The verdict names what the trainer's time went to, and what to change."""

from typing import Any

import pytest

from fa_rollout.report.verdict import Bound, Facts, judge

SHARES = {"train": 0.95, "wait": 0.02, "update": 0.02, "other": 0.01}
PLAIN: dict[str, Any] = {
    "shares": SHARES,
    "load": 0.9,
    "load_in_waits": None,
    "away_share": 0.0,
    "staleness": 4,
    "staleness_max": 3,
    "bubble_share": 0.01,
    "num_ended": 100,
    "num_filtered": 0,
    "num_failed": 0,
}


def facts(**changes: Any) -> Facts:
    return Facts(**(PLAIN | changes))


def shares(**changes: float) -> dict[str, float]:
    rest = 1 - sum(changes.values())
    return dict.fromkeys(SHARES, 0.0) | {"train": rest} | changes


@pytest.mark.parametrize(
    ("changes", "bound", "words"),
    [
        ({}, Bound.TRAINING, ["95%", "2%"]),
        ({"load": 0.3}, Bound.TRAINING, ["30%", "fewer engines", "rollout.staleness"]),
        ({"shares": {}}, Bound.NOTHING, ["No step"]),
        ({"shares": shares(wait=0.4), "load_in_waits": 0.95}, Bound.ENGINES, ["40%", "95%", "engine.urls"]),
        ({"shares": shares(wait=0.4)}, Bound.ENGINES, ["40%"]),
        (
            {"shares": shares(wait=0.4), "load_in_waits": 0.2},
            Bound.ADMISSION,
            ["40%", "20%", "rollout.staleness (now 4)"],
        ),
        ({"shares": shares(wait=0.4), "away_share": 0.8}, Bound.GENERATOR, ["40%", "80%"]),
        ({"shares": shares(update=0.3)}, Bound.UPDATES, ["30%", "rollout.update_interval"]),
        ({"shares": shares(other=0.5)}, Bound.OWN_CODE, ["50%", "begin_evaluation"]),
        ({"shares": shares(wait=0.3, update=0.2)}, Bound.ENGINES, ["30%"]),
        ({"mistake": "the hub was lost"}, Bound.TRAINING, ["ended early", "the hub was lost"]),
    ],
)
def test_the_bound_is_named_with_its_number_and_its_key(
    changes: dict[str, Any], bound: Bound, words: list[str]
) -> None:
    verdict = judge(facts(**changes))
    assert verdict.bound is bound
    said = " ".join([verdict.headline, *verdict.advice])
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_failed": 3, "worst_reason": "reward: timeout"}, ["3 groups failed", "reward: timeout"]),
        ({"num_filtered": 40}, ["40% of the groups were filtered"]),
        ({"bubble_share": 0.2}, ["20%"]),
        ({"num_generator_deaths": 1}, ["replaced once"]),
        ({"staleness_max": 2}, ["2 versions old"]),
    ],
)
def test_notes_say_what_else_there_was(changes: dict[str, Any], words: list[str]) -> None:
    said = " ".join(judge(facts(**changes)).notes)
    for word in words:
        assert word in said


def test_a_quiet_run_has_no_notes() -> None:
    assert judge(facts(staleness_max=None)).notes == []
