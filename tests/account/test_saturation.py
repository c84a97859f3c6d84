"""An engine's saturation is that of its tokens per second, not of its slots."""

import pytest

from fa_rollout.hub.measures.saturation import engine_rates
from trainer_hook.messages import EngineFigures, Pace


def paces(loads: list[int], alone: float, most: float) -> list[Pace]:
    """Of an engine that makes `alone` tokens a second for one request, and `most` for all together."""
    return [Pace(tokens=1000.0, beside=1000.0 * n, spent_s=1000.0 * n / min(n * alone, most)) for n in loads]


def busy(in_flight: int, seen: list[Pace]) -> float | None:
    rates = engine_rates(EngineFigures(url="u", in_flight=in_flight, allowed=100, capacity=100, paces=seen))
    return None if rates is None else rates[0] / rates[1]


def test_a_saturated_engine_with_few_slots_in_use_is_busy() -> None:
    found = busy(30, paces([20, 24, 28, 32], alone=100.0, most=1500.0))
    assert found is not None
    assert found > 0.8


def test_an_engine_with_three_tenths_of_its_slots_in_use_makes_88_percent_of_what_it_can() -> None:
    below_and_above_the_knee = [
        Pace(tokens=2000.0, beside=2000.0 * n, spent_s=2000.0 * (0.0058 + 0.000936 * n)) for n in (3, 30)
    ]
    assert busy(30, below_and_above_the_knee) == pytest.approx(0.88, abs=0.005)


def test_an_engine_whose_answers_do_not_slow_down_is_as_busy_as_its_slots() -> None:
    assert busy(30, paces([5, 10, 20, 30], alone=100.0, most=1e9)) == pytest.approx(0.3)


def test_loads_that_are_too_much_alike_tell_nothing() -> None:
    assert busy(30, paces([30, 31], alone=100.0, most=1500.0)) is None
    assert busy(30, []) is None
