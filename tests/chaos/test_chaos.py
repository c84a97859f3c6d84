"""The short version of `scripts/chaos`: one storm, and the checkers themselves."""

from pathlib import Path
from typing import Any

import pytest

from fa_rollout.account import events
from fa_rollout.account.events import Event
from fa_rollout.account.figures import StepFigures, TimeSpent
from tests.chaos import ledger, truth
from tests.chaos.__main__ import Results, weather
from tests.chaos.storm import Account

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300)
def test_a_job_survives_a_storm_with_every_prompt_trained_once(tmp_path: Path) -> None:
    account = weather(tmp_path / "job", seed=3, num_steps=8, num_strikes=5)
    assert account.struck.total() > 0  # a fast machine trains the job before the storm has spent itself


def life(*found: Event) -> list[Event]:
    began = events.HubBegan(run="r", lineage="l", time_s=0.0, folder="", config={})
    return [began, *found]


def composed(num_ranks: int = 1) -> Event:
    return events.StepComposed(step=0, version=0, groups=[0], ranks=[[[(0, 0, False, 0)]]] * num_ranks)


ISSUED = events.GroupsIssued(groups=[0], attempts=[0], kept=[])
COMMITTED = events.GroupCommitted(
    group=0,
    attempt=0,
    sequence=0,
    bytes=1,
    versions=(0, 0),
    prompt_lens=[1],
    response_lens=[1],
    rewards=[0.0],
)
FIGURES = StepFigures(
    step=0,
    version=0,
    time_s=0.0,
    num_groups=1,
    num_samples=1,
    num_tokens=1,
    response_tokens=1,
    reward_mean=0.0,
    staleness_max=0,
    staleness_mean=0.0,
    spent=TimeSpent(),
)
TRAINED = events.StepTrained(step=0, version=0, groups=[0], figures=FIGURES)
DIED = events.GeneratorDied(how="killed", requeued=[0])
UNEVEN = events.HubEnded(
    exit_code=0, text="", counts={"taken": 3, "trained": 2, "failed": 0}, spent=TimeSpent()
)


@pytest.mark.parametrize(
    ("log", "rule"),
    [
        (life(ISSUED, COMMITTED, composed(), TRAINED), None),
        (life(ISSUED, COMMITTED, composed(), TRAINED, ISSUED), "issued again"),
        (life(ISSUED, COMMITTED, COMMITTED), "goes to committed"),
        (life(ISSUED, composed()), "goes to handed"),
        (life(ISSUED, ISSUED), "goes to issued"),
        (life(ISSUED, DIED, ISSUED), "attempts rise"),
        (life(ISSUED, COMMITTED, composed(num_ranks=2)), "two ranks"),
        (life(UNEVEN), "add up"),
    ],
)
def test_the_checker_of_the_log_sees_broken_rules(log: list[Event], rule: str | None) -> None:
    if rule is None:
        ledger.check(log)
        return
    with pytest.raises(AssertionError, match=rule):
        ledger.check(log)


PIECES = [
    truth.Piece(key=0, start=2, ids=[5, 6], logprobs=[-1.0, -2.0], versions=[3, 3]),
    truth.Piece(key=0, start=4, ids=[7], logprobs=[-3.0], versions=[4]),
]
SAMPLE = {
    "prompt_length": 2,
    "tokens": [8, 9, 5, 6, 7],
    "logprobs": [-1.0, -2.0, -3.0],
    "spans": [[3, 2], [4, 3]],
}


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"tokens": [8, 9, 5, 6, 6]}, False),
        ({"logprobs": [-1.0, -2.0, -3.5]}, False),
        ({"spans": [[3, 3]]}, False),
        (
            {"tokens": [8, 9, 5, 6, 7, 7], "logprobs": [-1.0, -2.0, -3.0, -3.0], "spans": [[3, 2], [4, 4]]},
            False,
        ),
    ],
)
def test_what_no_engine_sampled_is_found(changes: dict[str, Any], holds: bool) -> None:
    assert truth._is_made_of(SAMPLE | changes, PIECES) is holds


def test_a_storm_that_goes_on_adds_its_figures_up(tmp_path: Path) -> None:
    for seed in range(2):
        results = Results(tmp_path / "results.jsonl")
        assert not results.has(seed)
        account = Account(num_launches=2, num_samples=8)
        account.struck.update({"hub SIGKILL": 1, "rank SIGSTOP": 2})
        results.add(seed, account, 1.0)
    expected = "jobs=2 failed=0 faults=6 (2 kills, 4 stops, 0 engine faults, 0 user faults, 0 full disks)"
    assert Results(tmp_path / "results.jsonl").closing().startswith(expected)
