"""The short version of `scripts/chaos`: one storm, and the checkers themselves."""

from pathlib import Path
from typing import Any

import pytest

from tests.chaos import ledger, truth
from tests.chaos.__main__ import Results, weather
from tests.chaos.storm import Account

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300)
def test_a_job_survives_a_storm_with_every_prompt_trained_once(tmp_path: Path) -> None:
    account = weather(tmp_path / "job", seed=3, num_steps=8, num_strikes=5)
    assert account.struck.total() > 0  # a fast machine trains the job before the storm has spent itself


def life(*events: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"event": "began"}, *events]


ISSUED = {"event": "issued", "groups": [0], "attempts": [0]}
COMMITTED = {"event": "committed", "group": 0, "attempt": 0}
COMPOSED = {"event": "composed", "step": 0, "groups": [0], "ranks": [[[[0, 0, False, 0]]]]}
TRAINED = {"event": "trained", "step": 0, "groups": [0]}


@pytest.mark.parametrize(
    ("events", "rule"),
    [
        (life(ISSUED, COMMITTED, COMPOSED, TRAINED), None),
        (life(ISSUED, COMMITTED, COMPOSED, TRAINED, ISSUED), "issued again"),
        (life(ISSUED, COMMITTED, COMMITTED), "goes to committed"),
        (life(ISSUED, COMPOSED), "goes to handed"),
        (life(ISSUED, ISSUED), "goes to issued"),
        (life(ISSUED, {"event": "generator_died", "requeued": [0]}, ISSUED), "attempts rise"),
        (life(ISSUED, COMMITTED, COMPOSED | {"ranks": [[[[0, 0, False, 0]]]] * 2}), "two ranks"),
        (life({"event": "ended", "counts": {"taken": 3, "trained": 2, "failed": 0}}), "add up"),
    ],
)
def test_the_checker_of_the_log_sees_broken_rules(events: list[dict[str, Any]], rule: str | None) -> None:
    if rule is None:
        ledger.check(events)
        return
    with pytest.raises(AssertionError, match=rule):
        ledger.check(events)


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
