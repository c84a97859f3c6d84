"""Admission: what may start, as a table."""

import pytest

from fa_rollout.hub.flow.admission import AdmissionWindow, Load, credit


def load(**changes: float) -> Load:
    values = {
        "live": 0,
        "handed_since_publication": 0,
        "remaining": 10_000,
        "mean_record_bytes": 0.0,
        "ring_bytes": 1 << 30,
        "handed_bytes": 0,
    }
    return Load(**(values | changes))  # type: ignore[arg-type]


def window(staleness: int, interval: int = 1, step: int = 8, surplus: int = 0) -> AdmissionWindow:
    return AdmissionWindow(
        staleness=staleness, groups_per_version=step * interval, groups_per_step=step, surplus_groups=surplus
    )


@pytest.mark.parametrize(
    ("eta", "interval", "live", "handed", "expected"),
    [
        (0, 1, 0, 0, 8),
        (0, 1, 8, 0, 0),
        (0, 1, 0, 8, 0),
        (1, 1, 0, 8, 8),
        (4, 1, 12, 0, 28),
        (0, 2, 0, 8, 8),
        (1, 4, 0, 16, 48),
        (0, 1, 20, 0, 0),
    ],
)
def test_groups_alive_stay_within_the_window(
    eta: int, interval: int, live: int, handed: int, expected: int
) -> None:
    assert credit(window(eta, interval), load(live=live, handed_since_publication=handed)) == expected


def test_nothing_starts_beyond_the_end_of_the_run() -> None:
    assert credit(window(4), load(live=3, remaining=5)) == 2


def test_surplus_widens_the_window_but_not_the_end_of_the_run() -> None:
    assert credit(window(0, surplus=4), load()) == 12
    assert credit(window(0, surplus=4), load(remaining=8)) == 8


def test_measured_sizes_keep_the_window_inside_the_ring() -> None:
    assert credit(window(8), load(mean_record_bytes=1000.0, ring_bytes=20_000)) == 17
    assert credit(window(8), load(mean_record_bytes=1000.0, ring_bytes=20_000, handed_bytes=8_000)) == 9


def test_a_small_ring_still_admits_one_step() -> None:
    assert credit(window(4), load(mean_record_bytes=1e6, ring_bytes=1 << 20)) == 8


def test_the_smallest_limits_make_progress() -> None:
    assert credit(window(0, step=1), load(remaining=1)) == 1
