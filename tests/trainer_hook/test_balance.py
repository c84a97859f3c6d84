"""The split of a step over ranks is complete, disjoint, even and within its limit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_hook.batches.balance import SampleSize, split
from trainer_hook.errors import UnsplittableBatch


def sizes(lengths: list[int]) -> list[SampleSize]:
    return [
        SampleSize(record=index // 4, member=index % 4, num_tokens=length, loss_tokens=length // 2)
        for index, length in enumerate(lengths)
    ]


def length_of(samples: list[SampleSize]) -> dict[tuple[int, int], int]:
    return {(sample.record, sample.member): sample.num_tokens for sample in samples}


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 9).flatmap(
        lambda num_ranks: st.tuples(
            st.just(num_ranks), st.lists(st.integers(1, 500), min_size=num_ranks, max_size=120)
        )
    ),
    st.one_of(st.none(), st.integers(500, 3000)),
)
def test_every_sample_is_on_one_rank_once_and_ranks_are_even(
    case: tuple[int, list[int]], limit: int | None
) -> None:
    num_ranks, lengths = case
    samples = sizes(lengths)
    tokens = length_of(samples)
    ranks = split(samples, num_ranks=num_ranks, max_tokens_per_micro_batch=limit)

    parts = [part for rank in ranks for parts in rank for part in parts]
    real = [(part.record, part.member) for part in parts if not part.filler]
    assert sorted(real) == sorted(tokens)
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    heights = [[sum(tokens[p.record, p.member] for p in parts) for parts in rank] for rank in ranks]
    assert all(height > 0 for rank in heights for height in rank)
    if limit is None:
        assert {len(rank) for rank in ranks} == {1}
        totals = [sum(rank) for rank in heights]
        assert max(totals) - min(totals) <= max(lengths)
    else:
        assert max(height for rank in heights for height in rank) <= limit
    num_micro_batches = num_ranks * len(ranks[0])
    assert any(part.filler for part in parts) == (len(samples) < num_micro_batches)
    for rank in ranks:
        own = {(part.record, part.member) for parts in rank for part in parts if not part.filler}
        assert all((p.record, p.member) in own for parts in rank for p in parts if p.filler)


@given(st.lists(st.integers(1, 100), min_size=3, max_size=40), st.randoms())
def test_the_split_does_not_depend_on_the_order_of_its_input(lengths: list[int], random: object) -> None:
    samples = sizes(lengths)
    shuffled = list(samples)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert split(samples, num_ranks=3, max_tokens_per_micro_batch=200) == split(
        shuffled, num_ranks=3, max_tokens_per_micro_batch=200
    )


@pytest.mark.parametrize("limit", [None, 100, 1000])
def test_206_samples_go_to_4_ranks(limit: int | None) -> None:
    ranks = split(sizes([50] * 206), num_ranks=4, max_tokens_per_micro_batch=limit)
    parts = [part for rank in ranks for parts in rank for part in parts]
    assert sum(not part.filler for part in parts) == 206
    assert len({len(rank) for rank in ranks}) == 1
    assert sum(part.filler for part in parts) < 4


@pytest.mark.parametrize("num_samples", [0, 3])
def test_fewer_samples_than_ranks_are_refused_with_both_numbers(num_samples: int) -> None:
    with pytest.raises(UnsplittableBatch, match=rf"{num_samples} samples for 4 ranks"):
        split(sizes([10] * num_samples), num_ranks=4)


def test_a_sample_over_the_limit_is_refused_with_both_lengths() -> None:
    with pytest.raises(UnsplittableBatch, match=r"a sample of 101 tokens over the limit of 100"):
        split(sizes([10, 101]), num_ranks=1, max_tokens_per_micro_batch=100)


def test_micro_batches_of_one_index_are_alike_on_all_ranks() -> None:
    lengths = [400, 390, 300, 310, 200, 190, 100, 110]
    samples = sizes(lengths)
    tokens = length_of(samples)
    ranks = split(samples, num_ranks=2, max_tokens_per_micro_batch=400)
    heights = [[sum(tokens[p.record, p.member] for p in parts) for parts in rank] for rank in ranks]
    assert all(abs(first - second) <= 110 for first, second in zip(*heights, strict=True))
