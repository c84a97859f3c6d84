"""What limits a run's speed: rules that the live view and the report share."""

from typing import Any

import pytest

from fa_rollout.account.bound import (
    Bound,
    Holds,
    Level,
    Stretch,
    bound_of,
    cause,
    holds_of,
    level_of,
    remedies,
)
from fa_rollout.account.figures import TimeSpent
from fa_rollout.account.snapshot import TrainerPhase
from fa_rollout.account.verdict import RunFacts, judge, judge_run
from tests.observe.shots import changed, engine, healthy


def spent(away: float = 0.0, **shares: float) -> TimeSpent:
    """Of a hundred seconds; what is not named was training."""
    return TimeSpent(**shares, training=100.0 - sum(shares.values()), without_generator=away)


def stretch(**changes: Any) -> Stretch:
    return Stretch(**({"spent": spent(waiting=2.0), "staleness": 4, "busy": 0.9} | changes))


AT_BOUND = Holds(limit="the staleness limit")
ONE_OUT = Holds(engines_out=1.0, out="1 of 2 engines, out: http://10.0.0.2:30000: refused")
WAITS = {"spent": spent(waiting=40.0)}


@pytest.mark.parametrize(
    ("changes", "bound", "level", "words"),
    [
        ({"spent": TimeSpent()}, Bound.NOTHING, Level.NOTE, ["groups that failed"]),
        ({}, Bound.TRAINING, Level.OK, ["speed the trainer up"]),
        (
            {"busy": 0.3, "num_engines": 2},
            Bound.TRAINING,
            Level.OK,
            ["30%", "fewer engines", "rollout.staleness"],
        ),
        ({"spent": spent(waiting=5.0)}, Bound.TRAINING, Level.OK, []),
        ({"spent": spent(waiting=6.0)}, Bound.ENGINES, Level.NOTE, ["90%"]),
        (WAITS, Bound.ENGINES, Level.WARN, ["90% busy", "engine.urls", "max_concurrent_samples"]),
        (WAITS | {"busy": None}, Bound.ENGINES, Level.WARN, []),
        (WAITS | {"busy": 0.2}, Bound.IN_FLIGHT, Level.WARN, ["20% busy", "rollout.staleness"]),
        (WAITS | {"busy": 0.2, "holds": AT_BOUND}, Bound.STALENESS, Level.WARN, ["= 4", "20% busy"]),
        (WAITS | {"holds": Holds(ring_full=0.6)}, Bound.RING, Level.WARN, ["ring.bytes"]),
        (WAITS | {"holds": Holds(ring_full=0.4)}, Bound.ENGINES, Level.WARN, []),
        (WAITS | {"holds": Holds(scoring=1.0)}, Bound.REWARDS, Level.WARN, ["reward.num_workers"]),
        (WAITS | {"holds": ONE_OUT}, Bound.ENGINES_OUT, Level.WARN, ["1 of 2 engines"]),
        (WAITS | {"filtered": 0.7}, Bound.FILTER, Level.WARN, ["70%", "difficulty"]),
        ({"spent": spent(waiting=40.0, away=32.0)}, Bound.GENERATOR, Level.WARN, ["80%"]),
        ({"spent": spent(waiting_for_ranks=25.0)}, Bound.RANKS, Level.NOTE, ["25%", "slower"]),
        ({"spent": spent(updating=30.0)}, Bound.UPDATES, Level.NOTE, ["30%", "rollout.update_interval"]),
        ({"spent": spent(outside=50.0)}, Bound.OUTSIDE, Level.NOTE, ["50%", "begin_evaluation"]),
        ({"spent": spent(waiting=30.0, updating=20.0)}, Bound.ENGINES, Level.WARN, []),
    ],
)  # fmt: skip
def test_the_bound_is_named_with_its_number_and_its_key(
    changes: dict[str, Any], bound: Bound, level: Level, words: list[str]
) -> None:
    found = stretch(**changes)
    assert bound_of(found) is bound
    assert level_of(bound, found) is level
    said = " ".join([cause(bound, found), *remedies(bound, found)])
    for word in words:
        assert word in said


@pytest.mark.parametrize("bound", list(Bound))
def test_every_bound_has_a_remedy_and_all_but_two_a_cause(bound: Bound) -> None:
    assert remedies(bound, stretch())
    assert bool(cause(bound, stretch())) is (bound not in (Bound.NOTHING, Bound.TRAINING))


def test_one_engine_is_not_told_to_become_fewer() -> None:
    assert "fewer engines" not in " ".join(remedies(Bound.TRAINING, stretch(busy=0.3, num_engines=1)))


@pytest.mark.parametrize("busy", [0.3, 0.97])
@pytest.mark.parametrize("limit", ["", "the staleness limit", "ring space"])
@pytest.mark.parametrize("waiting", [0.0, 5.0, 15.0, 40.0])
def test_the_live_view_and_the_report_say_the_same_of_the_same_run(
    busy: float, limit: str, waiting: float
) -> None:
    now = changed(
        healthy(),
        trainer={"recent": spent(waiting=waiting)},
        generator={"busy": busy, "waiting_for_engines": 0},
        groups={"limit": limit},
    )
    whole = stretch(
        spent=spent(waiting=waiting), busy=busy, staleness=2, num_engines=2, holds=holds_of([now])
    )
    live, told = judge(now), judge_run(RunFacts(stretch=whole))
    assert (live.level, live.headline, live.bound) == (told.level, told.headline, told.bound)
    if told.bound is not Bound.TRAINING:
        assert live.why == told.why


@pytest.mark.parametrize(
    ("shares", "begins"),
    [
        ({"updating": 40.0}, "weight updates take 40%"),
        ({"outside": 40.0}, "the trainer's own code"),
        ({"waiting_for_ranks": 40.0}, "ranks wait for the slowest"),
    ],
)
def test_what_is_no_wait_for_data_comes_before_the_idle_share(shares: dict[str, float], begins: str) -> None:
    time = spent(**shares)
    told = judge(changed(healthy(), trainer={"recent": time})).headline
    assert told == judge_run(RunFacts(stretch=stretch(spent=time))).headline
    assert told.startswith(begins)
    assert told.endswith("; trainer idle 0%")


def test_a_moment_does_not_turn_the_live_verdict() -> None:
    low = {"trainer": {"recent": spent(waiting=30.0)}, "generator": {"busy": 0.5}}
    bound = changed(healthy(), groups={"limit": "the staleness limit"}, **low)
    full = changed(healthy(), groups={"limit": "ring space"}, **low)
    assert "the ring is full" in judge(full).headline
    assert "the staleness limit" in judge(full, [bound, bound, full]).headline


def test_looks_at_which_the_trainer_waited_count_before_others_and_all_for_the_load() -> None:
    waiting = {"phase": TrainerPhase.WAITING}
    at_bound = changed(healthy(), groups={"limit": "the staleness limit"}, generator={"busy": 0.5})
    full = changed(healthy(), groups={"limit": "ring space"}, generator={"busy": 0.9}, trainer=waiting)
    holds = holds_of([at_bound, at_bound, full])
    assert (holds.ring_full, holds.limit) == (1.0, "ring space")
    assert holds.busy == pytest.approx((0.5 + 0.5 + 0.9) / 3)


def test_looks_are_counted_as_shares() -> None:
    full = changed(healthy(), groups={"limit": "ring space"})
    lost = changed(healthy(), engines=[engine(1), engine(2, "out", last_error="refused")])
    holds = holds_of([full, full, full, lost])
    assert (holds.ring_full, holds.engines_out, holds.limit) == (0.75, 0.25, "ring space")
    assert holds.out == "1 of 2 engines, out: http://10.0.0.2:30000: refused"
    assert holds_of([]) == Holds()
