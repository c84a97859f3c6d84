"""What the verdict on a whole run says beyond its bound."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fa_rollout.account.bound import Bound, Level, Stretch
from fa_rollout.account.figures import TimeSpent
from fa_rollout.account.snapshot import Snapshot, TrainerPhase
from fa_rollout.account.verdict import RunFacts, judge_run
from fa_rollout.report.looks import FILE_NAME, seen
from tests.observe.shots import changed, engine, healthy

STRETCH = Stretch(
    spent=TimeSpent(waiting=2.0, training=95.0, updating=2.0, outside=1.0), staleness=4, busy=0.9
)


def facts(**changes: Any) -> RunFacts:
    return RunFacts(**({"stretch": STRETCH, "num_ended": 100} | changes))


def test_a_run_that_trained_is_told_with_its_two_shares() -> None:
    verdict = judge_run(facts())
    assert (verdict.bound, verdict.level) == (Bound.TRAINING, Level.OK)
    assert verdict.headline == "healthy: trainer idle 2%, engines 90% busy"
    assert verdict.notes == []


def test_a_run_that_ended_early_is_bad_whatever_it_was_bound_by() -> None:
    verdict = judge_run(facts(mistake="the hub was lost"))
    assert (verdict.bound, verdict.level) == (Bound.TRAINING, Level.BAD)
    assert verdict.headline.startswith("the run ended early: the hub was lost; until then: healthy")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_failed": 3, "worst_reason": "reward: timeout"}, ["3 groups failed", "reward: timeout"]),
        ({"num_filtered": 40}, ["40% of the groups were filtered"]),
        ({"bubble_share": 0.2}, ["20%"]),
        ({"num_generator_deaths": 1}, ["replaced once"]),
        ({"staleness_max": 2}, ["2 versions old; the limit is 4"]),
    ],
)
def test_notes_say_what_else_there_was(changes: dict[str, Any], words: list[str]) -> None:
    said = " ".join(judge_run(facts(**changes)).notes)
    for word in words:
        assert word in said


def test_looks_count_where_the_trainer_waited_and_those_of_other_releases_do_not(tmp_path: Path) -> None:
    waiting = {"phase": TrainerPhase.WAITING}
    full = changed(healthy(), groups={"limit": "ring space"})
    lines = [
        _line(changed(full, trainer=waiting)),
        _line(changed(full, trainer=waiting, totals={"steps": 0})),  # start-up
        _line(healthy()),  # it trains
        _line(changed(healthy(), run={"name": "another"}, trainer=waiting)),
        json.dumps({"run": {"name": healthy().run.name}, "steps": "of another release"}),
        _line(changed(healthy(), engines=[engine(9)])),
        _line(changed(healthy(), engines=[])),
        '{"half',
    ]
    (tmp_path / FILE_NAME).write_text("\n".join(lines))
    holds, engines = seen(tmp_path, healthy().run.name)
    assert holds.ring_full == 1.0
    assert engines == [engine(9)]
    assert seen(tmp_path / "nowhere", "")[1] == []


def _line(now: Snapshot) -> str:
    return msgspec.json.encode(now).decode()
