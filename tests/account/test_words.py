"""One set of formatters for the terminal, the report and logs."""

import pytest

from fa_rollout.account.words import number, seconds, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (7, "7"), (0.1234, "0.123"), (-3.5, "-3.5"), (99.96, "100"), (999.6, "1,000"),
        (1234, "1,234"), (4100.4, "4,100"), (9999.9, "10k"), (12345, "12.3k"), (999_600, "1M"),
        (8.9e6, "8.9M"), (1e9, "1G"),
    ],
)  # fmt: skip
def test_numbers_keep_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123, "12 ms"), (1.24, "1.2 s"), (9.97, "10 s"), (59.9, "60 s"), (250, "4m 10s"), (7500, "2h 05m"),
     (2e5, "2d 07h")],
)  # fmt: skip
def test_times_have_the_unit_that_fits(value: float, text: str) -> None:
    assert seconds(value) == text


def test_sizes_carry_over() -> None:
    assert [size(v) for v in (12, 1536, (1 << 20) - 1)] == ["12 B", "1.5 KiB", "1.0 MiB"]
