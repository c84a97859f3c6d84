"""Flow control on a virtual clock: progress, staleness bound and length bias over a sweep of settings."""

import io
import itertools

import pytest
from rich.console import Console

from fa_rollout.simulation import sweep, table
from fa_rollout.simulation.model import simulate
from fa_rollout.simulation.outcome import SimulationOutcome
from fa_rollout.simulation.scenario import Scenario

SWEEP = [
    (policy, partial, interval, eta, rejection)
    for policy, partial, interval, eta, rejection in itertools.product(
        ("wait", "drop", "retry", "mask", "keep"),
        ("resume", "restart"),
        (1, 2, 4),
        (0, 1, 4, 8),
        (0.0, 0.5, 0.9),
    )
]
"""720 settings: update interval 1-4, η 0-8, rejection 0-90 %, every policy, resume and restart."""


def play(**changes: object) -> SimulationOutcome:
    return simulate(Scenario(**({"num_steps": 16, "groups_per_step": 4, "num_slots": 24} | changes)))  # type: ignore[arg-type]


def check_counts(outcome: SimulationOutcome, num_steps: int) -> None:
    counts = outcome.counts
    settled = counts["trained"] + counts["filtered"] + counts["failed"] + counts["dropped"]
    live = counts["queued"] + counts["issued"] + counts["running"] + counts["committed"] + counts["handed"]
    assert counts["taken"] == settled + live
    assert counts["trained"] == num_steps * 4


@pytest.mark.parametrize("part", range(8))
def test_every_setting_makes_progress_within_its_bound(part: int) -> None:
    for policy, partial, interval, eta, rejection in SWEEP[part::8]:
        setting = f"{policy} {partial} interval={interval} eta={eta} rejection={rejection}"
        outcome = play(
            staleness_policy=policy,
            partial=partial,
            update_interval=interval,
            staleness=eta,
            rejection=rejection,
        )
        check_counts(outcome, 16)
        if policy in ("wait", "drop"):
            assert max(outcome.staleness) <= eta, setting
        if policy == "wait":
            assert outcome.counts["dropped"] == 0, setting


@pytest.mark.parametrize("policy", ["wait", "keep"])
@pytest.mark.parametrize("eta", [0, 1, 2, 4])
def test_policies_that_promise_it_have_no_length_bias(policy: str, eta: int) -> None:
    for seed in range(3):
        outcome = play(staleness_policy=policy, staleness=eta, num_steps=80, seed=seed)
        assert abs(outcome.length_bias) < 0.02


def test_dropping_what_is_stale_shortens_answers_and_the_figures_say_so() -> None:
    outcome = play(staleness_policy="drop", staleness=1, num_steps=80)
    assert outcome.length_bias < -0.05
    mean_dropped = sum(outcome.dropped_lengths) / len(outcome.dropped_lengths)
    assert mean_dropped > sum(outcome.trained_lengths) / len(outcome.trained_lengths)


def test_nothing_is_generated_beyond_the_runs_end() -> None:
    outcome = play(staleness_policy="wait", staleness=8)
    assert outcome.counts["taken"] == outcome.counts["trained"]


def test_the_smallest_limits_make_progress() -> None:
    outcome = simulate(
        Scenario(num_steps=5, groups_per_step=1, samples_per_group=1, num_slots=1, staleness=0)
    )
    assert outcome.counts["trained"] == 5


def test_a_larger_bound_never_makes_the_trainer_wait_longer() -> None:
    idle = [play(staleness=eta, num_steps=80).trainer_idle for eta in (0, 1, 2, 4)]
    assert idle == sorted(idle, reverse=True)


@pytest.mark.parametrize("policy", ["wait", "drop", "retry", "mask", "keep"])
@pytest.mark.parametrize("eta", [0, 2])
def test_over_sampling_makes_progress_within_the_bound_and_loses_no_group(policy: str, eta: int) -> None:
    for rejection in (0.0, 0.5):
        outcome = play(staleness_policy=policy, staleness=eta, surplus_groups=3, rejection=rejection)
        check_counts(outcome, 16)
        if policy in ("wait", "drop"):
            assert max(outcome.staleness) <= eta
        if policy == "retry":
            assert outcome.counts["dropped"] <= outcome.counts["trained"]


def test_cancelling_the_surplus_makes_steps_shorter_and_answers_too() -> None:
    plain = play(staleness_policy="drop", staleness=0, num_steps=60)
    surplus = play(staleness_policy="drop", staleness=0, num_steps=60, surplus_groups=4)
    assert surplus.mean_step_s < 0.9 * plain.mean_step_s
    assert surplus.counts["dropped"] > 0
    assert surplus.length_bias < -0.05 < abs(plain.length_bias) + 0.05


def test_waiting_for_the_surplus_keeps_lengths_as_they_are() -> None:
    for seed in range(3):
        outcome = play(staleness=0, surplus_groups=3, num_steps=80, seed=seed)
        assert outcome.counts["dropped"] > 0
        assert abs(outcome.length_bias) < 0.03


@pytest.mark.parametrize("columns", [20, 80])
def test_a_narrow_terminal_cuts_no_figure(columns: int) -> None:
    out = io.StringIO()
    sweeps = sweep.parse(["staleness=1,2", "engines=1,2"])
    rows = list(sweep.play(Scenario(num_steps=4), sweeps, num_seeds=1))
    table.show(Scenario(num_steps=4), sweeps, rows, Console(file=out, width=columns))
    assert "…" not in out.getvalue()
    heads = next(line for line in out.getvalue().splitlines() if line.startswith("staleness engines"))
    assert heads.split()[-3:] == ["p99", "dropped", "length"]
