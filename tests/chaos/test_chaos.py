"""The short version of `scripts/chaos`: one storm, and the checkers themselves."""

from pathlib import Path
from typing import Any

import pytest

from tests.chaos import ledger
from tests.chaos.__main__ import weather

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300)
def test_a_job_survives_a_storm_with_every_prompt_trained_once(tmp_path: Path) -> None:
    account = weather(tmp_path / "job", seed=3, num_steps=12, num_strikes=7)
    assert account.num_kills > 0  # a fast machine trains the job before the storm has spent itself


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
