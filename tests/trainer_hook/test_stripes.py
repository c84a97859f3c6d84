"""Rows of a packed column, made without the others."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_hook.batches.packing import _strided


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=6),
    rows=st.slices(30).filter(lambda rows: rows.step is None or rows.step > 0),
)
def test_a_stripe_is_that_of_the_whole(pieces: list[tuple[int, int]], rows: slice) -> None:
    """Pieces of a length, each after a gap in which no row is."""
    parts, starts, whole = [], [], []
    for length, gap in pieces:
        starts.append(len(whole) + gap)
        part = np.arange(1, length + 1, dtype=np.int32) + 100 * len(parts)
        parts.append(part)
        whole += [0] * gap + part.tolist()
    wanted = range(len(whole))[rows]
    assert _strided(parts, starts, wanted).tolist() == whole[rows]


def test_rows_from_the_end_are_refused() -> None:
    with pytest.raises(ValueError, match="found -1"):
        _strided([np.arange(3)], [0], range(3)[::-1])
