"""What the hub remembers for those who look: bounded, counted by kind, summed over lives of the generator."""

import pytest

from fa_rollout.account.figures import TimeSpent
from fa_rollout.account.reasons import kind_of
from fa_rollout.hub.flow.admission import AdmissionWindow, Load, credit, limits
from fa_rollout.hub.measures.pulses import WINDOW_S, Pulses
from fa_rollout.hub.measures.recent import NUM_REASONS, NUM_WARNINGS, History
from fa_rollout.hub.reporting.snapshots import RECENT_STEPS, recent
from tests.observe.shots import step
from trainer_hook.messages import EngineFigures, Pulse


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("reward: timeout: 60 s", "reward: timeout"),
        ("raised: ZeroDivisionError: division by zero (task.py:3)", "raised: ZeroDivisionError"),
        ("RequestTimedOut: g12.0-m3-7 at http://10.0.0.1", "RequestTimedOut"),
        ("no step from version 31 on can train it", "no step from version N on can train it"),
        ("over-long: a prompt may have 512 tokens, found 900", "over-long"),
        ("x" * 500, "x" * 60),
    ],
)
def test_reasons_are_of_one_kind_by_their_first_words(reason: str, kind: str) -> None:
    assert kind_of(reason) == kind


def test_a_long_run_is_remembered_in_a_bounded_way() -> None:
    history = History()
    for number in range(500):
        history.warned(f"warning {number % 40}")
        history.lost("failed", f"{'abc'[number % 3]}{'z' * (number % 50)}: {number}")
        history.published(number, write_s=0.1, load_s=0.1, bubble_s=0.5)
    assert len(history.warnings()) == NUM_WARNINGS
    assert history.warnings()[-1].text == "warning 19"
    assert len(history.reasons()) == NUM_REASONS
    assert history.num_warnings == history.num_updates == 500
    assert history.bubble_s == pytest.approx(250.0)


def test_the_same_is_told_once_with_its_count() -> None:
    history = History()
    for number in range(3):
        history.warned("a disk is full")
        history.lost("failed", f"reward: timeout: {number} s")
    history.lost("dropped", "reward: timeout: 9 s")
    assert [(warning.text, warning.count) for warning in history.warnings()] == [("a disk is full", 3)]
    first, second = history.reasons()
    assert (first.outcome, first.reason, first.count) == ("failed", "reward: timeout", 3)
    assert first.last == "reward: timeout: 2 s"
    assert (second.outcome, second.count) == ("dropped", 1)


def pulse(tokens: int, in_flight: int, waiting_for_ring: int = 0) -> Pulse:
    return Pulse(
        num_queued=0,
        num_running=1,
        num_waiting_for_ring=waiting_for_ring,
        tokens_per_s=7.0,
        loop_gap_ms=0.0,
        tokens=tokens,
        engines=[EngineFigures(url="u", in_flight=in_flight, allowed=10, capacity=10, num_tokens=tokens)],
    )


def test_rates_are_means_of_the_window_and_sums_outlive_the_generator() -> None:
    pulses = Pulses()
    pulses.concurrency = 10
    assert (pulses.load, pulses.tokens_per_s, pulses.age_s(0.0)) == (None, 0.0, None)
    pulses.add(pulse(100, 4), 0.0)
    assert pulses.tokens_per_s == 7.0, "one report alone says its own rate"
    pulses.add(pulse(300, 8), 2.0)
    assert pulses.tokens_per_s == pulses.engine_tokens_per_s("u") == 100.0
    assert pulses.load == pytest.approx(0.6)
    pulses.concurrency = 8
    assert pulses.load == pytest.approx(0.75), "slots for evaluations are none of training's"
    pulses.end_life(2.5)
    assert (pulses.load, pulses.total("tokens")) == (None, 300)
    pulses.add(pulse(50, 0), 3.0)
    assert pulses.total("tokens") == 350
    pulses.add(pulse(60, 0), 3.0 + WINDOW_S + 1.0)
    assert pulses.tokens_per_s == 7.0, "what is older than the window is forgotten"


def test_a_full_ring_is_told_with_its_duration() -> None:
    pulses = Pulses()
    pulses.add(pulse(0, 0, waiting_for_ring=1), 1.0)
    pulses.add(pulse(0, 0, waiting_for_ring=3), 4.0)
    assert pulses.ring_full_s(6.0) == 5.0
    pulses.add(pulse(0, 0), 7.0)
    assert pulses.ring_full_s(9.0) == 0.0


def test_recent_time_is_half_a_minute_or_some_steps_and_never_start_up() -> None:
    lap = TimeSpent(training=1.0)
    steps = [step(0, is_first=True, spent=TimeSpent(training=500.0))] + [step(n) for n in range(1, 200)]
    assert 30.0 <= recent(steps, lap).total_s < 33.0
    slow = [step(n, spent=TimeSpent(waiting=60.0, training=60.0)) for n in range(20)]
    assert recent(slow, lap).total_s == 1.0 + RECENT_STEPS * 120.0
    assert recent(steps[:3], lap).total_s == pytest.approx(3.0)
    assert recent([], TimeSpent()).idle is None


def test_the_tightest_limit_has_a_name() -> None:
    window = AdmissionWindow(staleness=1, groups_per_version=4, groups_per_step=4)
    load = Load(
        live=8,
        handed_since_publication=0,
        remaining=100,
        mean_record_bytes=10.0,
        ring_bytes=1000,
        handed_bytes=0,
    )
    named = limits(window, load)
    assert min(named, key=named.__getitem__) == "the staleness limit"
    assert credit(window, load) == 0
    assert named["ring space"] == 85
    assert named["the end of the run"] == 100
