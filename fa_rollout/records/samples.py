"""Samples of a run, each with what became of it: the sample log joined with the history, filtered, in order.

In: a folder, a history, a choice. Out: at most so many samples. Invariant: memory holds the chosen ones and
one group, however long the log is.

P prompt tokens, R response tokens.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_rollout.records.history import History
from fa_rollout.records.sample_file import COMMITTED, WrittenGroup, files_of, read
from fa_rollout.records.story import Group


class Fate(StrEnum):
    """What became of a sample."""

    TRAINED = "trained"
    HANDED = "in training"
    READY = "ready"
    """Committed; no step has taken it yet."""
    FILTERED = "filtered"
    FAILED = "failed"
    DROPPED = "dropped"
    AGAIN = "given back"
    """Its group was tried again, or will be."""


_FATES = {"trained": Fate.TRAINED, "handed": Fate.HANDED, "committed": Fate.READY, "filtered": Fate.FILTERED}
_FATES |= {"failed": Fate.FAILED, "dropped": Fate.DROPPED}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSample:
    """One sample, or a group that ended without any."""

    group: int
    attempt: int
    member: int | None
    """None: the group has no samples."""
    prompt_index: int
    label: Any = None
    fate: Fate
    reason: str = ""
    step: int | None = None
    version: int | None = None
    """That trained it."""
    prompt_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """[P]"""
    response_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """[R]"""
    loss_mask: npt.NDArray[np.uint8] | None = None
    """[R] None: all tokens are trained."""
    version_spans: tuple[tuple[int, int], ...] = ()
    """(version, end)"""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    finish_reason: str | None = None
    duration_s: float = 0.0
    """Of its group, from the start of its work to its end."""
    ended_s: float = 0.0

    @property
    def staleness(self) -> int | None:
        """Version that trained it minus the oldest that sampled a token of it."""
        versions = [version for version, _ in self.version_spans]
        if self.version is None or not versions or min(versions) < 0:
            return None
        return self.version - min(versions)

    @property
    def masked_spans(self) -> list[tuple[int, int]]:
        """[start, end) of response tokens that are not trained."""
        if self.loss_mask is None:
            return []
        edges = np.flatnonzero(np.diff(np.concatenate([[1], self.loss_mask != 0, [1]])))
        return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


class SampleOrder(StrEnum):
    """Which samples come first."""

    NEWEST = "newest"
    WORST = "worst"
    BEST = "best"
    LONGEST = "longest"
    STALE = "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which samples, and how many of them."""

    order: SampleOrder = SampleOrder.NEWEST
    fates: frozenset[Fate] = frozenset()
    """Empty: all."""
    step: int | None = None
    group: int | None = None
    limit: int = 5

    def takes(self, sample: KeptSample) -> bool:
        """Whether a sample is one of those."""
        return (
            (not self.fates or sample.fate in self.fates)
            and self.step in (None, sample.step)
            and self.group in (None, sample.group)
            and (self.order not in _KEYS or _KEYS[self.order](sample) is not None)
        )


_KEYS: dict[SampleOrder, Callable[[KeptSample], float | None]] = {
    SampleOrder.WORST: lambda s: s.reward,
    SampleOrder.BEST: lambda s: None if s.reward is None else -s.reward,
    SampleOrder.LONGEST: lambda s: None if s.member is None else -len(s.response_ids),
    SampleOrder.STALE: lambda s: None if s.staleness is None else -s.staleness,
}
"""What is lowest comes first; None: the sample has no place in this order."""


def select(folder: Path, history: History, choice: Choice) -> list[KeptSample]:
    """The samples of a launch that a choice takes, in its order; of equals the newest first."""
    every = (sample for sample in _all(folder, history, choice) if choice.takes(sample))
    if choice.order is SampleOrder.NEWEST:
        return heapq.nlargest(choice.limit, every, key=lambda sample: sample.ended_s)
    key = _KEYS[choice.order]
    return heapq.nsmallest(choice.limit, every, key=lambda sample: (key(sample) or 0.0, -sample.ended_s))


def _all(folder: Path, history: History, choice: Choice) -> Iterator[KeptSample]:
    seen: set[tuple[int, int]] = set()
    for name, path in files_of(folder).items():
        if name.run != history.run:
            continue
        for written in read(path):
            seen.add((written.group, written.attempt))
            if choice.group in (None, written.group):
                yield from _samples(written, history.groups.get(written.group))
    yield from _without_samples(history, seen)


def _without_samples(history: History, seen: set[tuple[int, int]]) -> Iterator[KeptSample]:
    """Groups that ended untrained, and of which the sample log has nothing (any more)."""
    for group in history.groups.values():
        fate = _FATES.get(group.place)
        if fate in (Fate.FILTERED, Fate.FAILED, Fate.DROPPED) and (group.group, group.attempt) not in seen:
            yield KeptSample(
                group=group.group,
                attempt=group.attempt,
                member=None,
                prompt_index=-1,
                fate=fate,
                reason=group.reason,
                ended_s=group.ended_s or 0.0,
            )


def _samples(written: WrittenGroup, group: Group | None) -> Iterator[KeptSample]:
    fate, reason = _fate(written, group)
    is_taken = group is not None and fate in (Fate.TRAINED, Fate.HANDED)
    plain = KeptSample(
        group=written.group,
        attempt=written.attempt,
        member=None,
        prompt_index=written.prompt_index,
        label=written.label,
        fate=fate,
        reason=reason,
        step=group.step if group is not None and is_taken else None,
        version=group.version if group is not None and is_taken else None,
        prompt_ids=np.frombuffer(written.prompt_ids, "<i4"),
        duration_s=written.ended_s - written.started_s,
        ended_s=written.ended_s,
    )
    if not written.members:
        yield plain
    ends = list(itertools.accumulate(written.response_lens, initial=0))
    ids = np.frombuffer(written.response_ids, "<i4")
    mask = np.frombuffer(written.loss_mask, np.uint8) if written.loss_mask else None
    for index, member in enumerate(written.members):
        start, end = ends[index], ends[index + 1]
        own = mask[start:end] if mask is not None else None
        yield replace(
            plain,
            member=member,
            prompt_ids=np.frombuffer(written.own_prompt_ids[index], "<i4")
            if written.own_prompt_ids
            else plain.prompt_ids,
            response_ids=ids[start:end],
            loss_mask=None if own is None or own.all() else own,
            version_spans=tuple((span.version, span.end) for span in written.version_spans[index]),
            reward=written.rewards[index],
            reward_parts=written.reward_parts[index] if written.reward_parts else {},
            finish_reason=written.finish_reasons[index],
        )


def _fate(written: WrittenGroup, group: Group | None) -> tuple[Fate, str]:
    """What became of an attempt, and why. What the books do not know of yet is on its way to them."""
    if written.outcome != COMMITTED:
        return _FATES[written.outcome], written.reason
    if group is None:
        return Fate.READY, ""
    if group.place == "queued" or group.attempt > written.attempt:
        return Fate.AGAIN, group.reason
    if group.place in ("issued", "running"):
        is_older = group.issued_s > written.ended_s
        return (Fate.AGAIN, group.reason) if is_older else (Fate.READY, "")
    return _FATES[group.place], group.reason
