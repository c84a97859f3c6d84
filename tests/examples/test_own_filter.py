from pathlib import Path

import pytest

from tests.examples.follow import counts, follow_example, numbers, rises


@pytest.mark.slow
def test_own_filter_trains_what_can_be_learnt(tmp_path: Path) -> None:
    output = follow_example("own_filter", tmp_path)
    assert rises(numbers(r"reward=(\S+)", output), by=0.2)
    books = counts(output)
    assert books["trained"] == 20 * 8
    assert books["filtered"] > 100
    assert books["failed"] == books["dropped"] == 0
