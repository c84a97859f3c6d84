"""Splits the samples of a step over ranks and micro-batches.

In: the size of every sample of the step. Out: `[rank][micro_batch][part]`. Pure and deterministic across
machines, so a recorded step can be split again.

Invariant: every sample is on exactly one rank, once; every rank has the same number of micro-batches, none of
them empty; no micro-batch exceeds the limit. Micro-batches have about equal numbers of tokens, most closely
those of one index on different ranks, because the ranks run collectives together once per index.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from trainer_hook.errors import UnsplittableBatch
from trainer_hook.messages import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSize:
    """Size of one sample, as input to the split."""

    record: int
    """Index of its record in the step."""
    member: int
    """Index inside the record."""
    num_tokens: int
    """Prompt and response: the cost of a forward pass."""
    loss_tokens: int = 0
    """Tokens in the loss; samples of equal length are also balanced by these."""


_Bin = list[SampleSize]


def split(
    samples: Sequence[SampleSize], *, num_ranks: int, max_tokens_per_micro_batch: int | None = None
) -> list[list[list[Part]]]:
    """Split the samples of a step: `[rank][micro_batch][part]`; `Part.record` counts the step's records.

    Without a limit each rank gets one micro-batch, and ranks differ by at most the longest sample. With a
    limit, best-fit decreasing packing determines the number of micro-batches. If there are fewer samples than
    micro-batches, the rank's shortest sample is repeated as a filler with an empty loss mask.

    Raises:
        UnsplittableBatch: there are fewer samples than ranks, or a sample is longer than the limit.
    """
    if len(samples) < num_ranks:
        raise UnsplittableBatch(
            "a step must have at least one sample for every data-parallel rank; found "
            f"{len(samples)} samples for {num_ranks} ranks: "
            "raise groups_per_step or samples_per_group, or use fewer ranks"
        )
    ordered = sorted(samples, key=lambda s: (-s.num_tokens, -s.loss_tokens, s.record, s.member))
    bins = _into_bins(ordered, num_ranks, max_tokens_per_micro_batch)
    return [
        [_as_parts(a_bin, rank_bins) for a_bin in rank_bins] for rank_bins in _over_ranks(bins, num_ranks)
    ]


def _num_tokens(a_bin: _Bin) -> int:
    return sum(sample.num_tokens for sample in a_bin)


def _into_bins(ordered: _Bin, num_ranks: int, limit: int | None) -> list[_Bin]:
    """All micro-batches of the step: a multiple of `num_ranks`, some of them empty if samples are too few."""
    if limit is None:
        return _spread(ordered, num_ranks)
    if ordered[0].num_tokens > limit:
        raise UnsplittableBatch(
            f"every sample must fit into a micro-batch; found a sample of {ordered[0].num_tokens} tokens "
            f"over the limit of {limit}: raise max_tokens_per_micro_batch or shorten prompts and answers"
        )
    packed = _pack(ordered, limit)
    num_bins = -(-len(packed) // num_ranks) * num_ranks
    even = _spread(ordered, num_bins)
    if max(map(_num_tokens, even)) <= limit:
        return even
    return _fill_empty(packed + [[] for _ in range(num_bins - len(packed))])


def _spread(ordered: _Bin, num_bins: int) -> list[_Bin]:
    """Longest first, each to the bin with the fewest tokens (Graham's LPT rule): balanced, no limit."""
    bins: list[_Bin] = [[] for _ in range(num_bins)]
    heap = [(0, 0, index) for index in range(num_bins)]
    for sample in ordered:
        num_tokens, num_samples, index = heap[0]
        bins[index].append(sample)
        heapq.heapreplace(heap, (num_tokens + sample.num_tokens, num_samples + 1, index))
    return bins


def _pack(ordered: _Bin, limit: int) -> list[_Bin]:
    """Longest first, each to the fullest bin with room for it (best-fit decreasing): few bins, unbalanced."""
    bins: list[_Bin] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, bin), kept sorted
    for sample in ordered:
        at = bisect_left(rooms, (sample.num_tokens, -1))
        room, index = rooms.pop(at) if at < len(rooms) else (limit, len(bins))
        if index == len(bins):
            bins.append([])
        bins[index].append(sample)
        insort(rooms, (room - sample.num_tokens, index))
    return bins


def _fill_empty(bins: list[_Bin]) -> list[_Bin]:
    """Move the last sample of the bin with the most samples to each empty bin, while any bin has two."""
    for empty in [a_bin for a_bin in bins if not a_bin]:
        donor = max(bins, key=len)
        if len(donor) > 1:
            empty.append(donor.pop())
    return bins


def _over_ranks(bins: list[_Bin], num_ranks: int) -> list[list[_Bin]]:
    """Assign layers of similar bins, one per rank; the rank with the fewest tokens gets the largest bin."""
    bins = sorted(bins, key=lambda a_bin: -_num_tokens(a_bin))
    ranks: list[list[_Bin]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for start in range(0, len(bins), num_ranks):
        by_total = sorted(range(num_ranks), key=lambda rank: totals[rank])
        for rank, a_bin in zip(by_total, bins[start : start + num_ranks], strict=True):
            ranks[rank].append(a_bin)
            totals[rank] += _num_tokens(a_bin)
    return ranks


def _as_parts(a_bin: _Bin, rank_bins: list[_Bin]) -> list[Part]:
    if a_bin:
        return [Part(sample.record, sample.member) for sample in a_bin]
    shortest = min((sample for other in rank_bins for sample in other), key=lambda sample: sample.num_tokens)
    return [Part(shortest.record, shortest.member, True)]
