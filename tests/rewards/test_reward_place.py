"""The decisions about workers, as tables."""

import pytest

from fa_rollout.rewards.workers.place import START_TIMEOUT_S, WorkerVerdict, backoff_s, judge, next_window


@pytest.mark.parametrize(
    ("ready", "num_held", "running_s", "verdict"),
    [
        (False, 0, START_TIMEOUT_S - 1, WorkerVerdict.FINE),
        (False, 0, START_TIMEOUT_S + 1, WorkerVerdict.NOT_LOADED),
        (True, 0, 1e9, WorkerVerdict.FINE),
        (True, 1, 0.001, WorkerVerdict.FINE),
        (True, 1, 9.9, WorkerVerdict.FINE),
        (True, 2, 0.001, WorkerVerdict.FINE),
        (True, 2, 0.1, WorkerVerdict.BEHIND),
        (True, 1, 10.1, WorkerVerdict.OVERDUE),
        (True, 2, 10.1, WorkerVerdict.OVERDUE),
    ],
)
def test_a_worker_is_judged_by_what_it_holds_and_for_how_long(
    ready: bool, num_held: int, running_s: float, verdict: WorkerVerdict
) -> None:
    assert judge(ready, num_held, running_s=running_s, timeout_s=10.0) is verdict


def test_a_worker_gets_more_ahead_while_items_are_quick_and_one_at_a_time_when_they_are_slow() -> None:
    window, windows = 1, []
    for elapsed_s in (0.001, 0.001, 0.001, 0.001, 0.001, 0.01, 0.1, 0.001):
        window = next_window(window, elapsed_s)
        windows.append(window)
    assert windows == [2, 4, 8, 16, 16, 16, 1, 2]


def test_the_first_death_is_mended_at_once_and_later_ones_ever_more_slowly_up_to_a_cap() -> None:
    waits = [backoff_s(num_deaths) for num_deaths in range(20)]
    assert waits[:4] == [0.0, 0.1, 0.2, 0.4]
    assert waits == sorted(waits)
    assert waits[-1] == waits[-2] == 5.0
