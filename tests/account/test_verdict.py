"""The first sentence about a run: the one thing that is to be said, and its cause."""

from typing import Any

import pytest

from fa_rollout.account.bound import Level
from fa_rollout.account.figures import TimeSpent
from fa_rollout.account.snapshot import Reason, RunPhase, TrainerPhase
from fa_rollout.account.verdict import judge
from tests.observe.shots import changed, engine, healthy, rank

WAITS_MUCH = {"recent": TimeSpent(waiting=12.0, training=16.0, updating=2.0)}


def test_a_healthy_run_is_told_with_its_two_shares() -> None:
    verdict = judge(healthy())
    assert verdict.level is Level.OK
    assert verdict.headline == "healthy: trainer idle 2%, engines 97% busy"
    assert verdict.why == ""


@pytest.mark.parametrize(
    ("parts", "level", "headline", "why"),
    [
        ({"run": {"phase": RunPhase.GIVEN_UP, "ending": "no engine"}}, Level.BAD, "has failed", "no engine"),
        ({"run": {"phase": RunPhase.ENDING, "ending": "SIGTERM"}}, Level.NOTE, "ending", "SIGTERM"),
        ({"run": {"phase": RunPhase.STARTING}, "generator": {"is_up": False}}, Level.NOTE, "starting", "for"),
        ({"generator": {"is_up": False}}, Level.BAD, "no generator", "8 finished groups"),
        ({"generator": {"pulse_age_s": 8.0}}, Level.WARN, "not reported for 8.0 s", "heartbeat"),
        ({"engines": [engine(1, "out", last_error="refused")]}, Level.BAD, "no engine responds", "refused"),
        ({"trainer": {"phase": TrainerPhase.ABSENT}}, Level.NOTE, "for the trainer", "8 groups are ready"),
        ({"trainer": {"phase": TrainerPhase.ATTACHING, "num_missing": 3}}, Level.NOTE, "3 more ranks", "for"),
        ({"trainer": {"recent": TimeSpent()}}, Level.NOTE, "first batch", "8 of 16"),
        ({"trainer": WAITS_MUCH}, Level.WARN, "trainer idle 40%: the engines are saturated", "Add engines"),
        (
            {"trainer": WAITS_MUCH, "groups": {"filtered": 1600}},
            Level.WARN,
            "the filter rejects 67%",
            "difficulty",
        ),
        ({"groups": {"failed": 90}, "reasons": [Reason(outcome="failed", reason="reward: timeout", count=90,
          last="reward: timeout: 60 s", age_s=1.0)]}, Level.OK, "healthy", "reward: timeout"),
        ({"generator": {"loop_gap_ms": 900.0}}, Level.OK, "healthy", "900 ms"),
    ],
)  # fmt: skip
def test_the_cause_is_named(parts: dict[str, Any], level: Level, headline: str, why: str) -> None:
    verdict = judge(changed(healthy(), **parts))
    assert (verdict.level, headline in verdict.headline, why in verdict.why) == (level, True, True), verdict


def test_a_stuck_rank_is_named_with_its_process() -> None:
    stuck = changed(
        healthy(),
        trainer={
            "since_s": 300.0,
            "ranks": [rank(0, TrainerPhase.WAITING, 299.0), rank(1, since_s=300.0)],
            "spent": TimeSpent(training=340.0, updating=10.0),
        },
    )
    verdict = judge(stuck)
    assert verdict.level is Level.WARN
    assert verdict.headline == "rank 1 is in step 50 for 5m 00s; a step takes 1.0 s on average"
    assert "py-spy dump --pid 4001" in verdict.why


@pytest.mark.parametrize(
    ("since_s", "updating_s", "is_stuck"), [(20.0, 50.0, True), (9.0, 50.0, False), (200.0, 50 * 30.0, False)]
)
def test_engines_that_load_for_much_longer_than_they_used_to_are_told(
    since_s: float, updating_s: float, is_stuck: bool
) -> None:
    """Fifty updates so far."""
    spent = TimeSpent(training=50.0, updating=updating_s + since_s)
    loading = {"phase": TrainerPhase.UPDATING, "in_update": "publishing", "since_s": since_s, "spent": spent}
    verdict = judge(changed(healthy(), trainer=loading))
    assert ("engines have been loading weights" in verdict.headline) is is_stuck


def test_a_long_step_of_a_slow_run_is_no_alarm() -> None:
    slow = changed(
        healthy(), trainer={"since_s": 300.0, "spent": TimeSpent(training=50 * 120.0, waiting=300.0)}
    )
    assert judge(slow).level is Level.OK
