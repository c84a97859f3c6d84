"""Which weight version sampled which token. Pure: labels reported by engines in, numbered spans out.

Invariant: a version number is assigned only if it is certain. Labels of another lineage, labels without a
number, versions never announced to the engines, and versions older than all engines had confirmed when the
request was sent (a restarted engine) count as unknown, never as current.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fa_rollout.client.engine.labels import OF_START
from trainer_hook.record import UNKNOWN_VERSION, VersionSpan

_MAX_DIGITS = 18
"""Numbers with this many digits fit a signed 64-bit integer, as in records and messages."""

Labels = Sequence[tuple[str | None, int]]
"""(label, end) over the output tokens of one reply; ends as in `VersionSpan`."""


@dataclass(slots=True)
class VersionBook:
    """The run's weight versions, as confirmed by the engines."""

    lineage: str
    published: int
    """Confirmed by every engine: tokens sampled from now on are not older."""
    announced: int = -1
    """The newest that any engine may have; above `published` during an update."""
    follows: bool = False
    """The trainer loads the engines' weights itself; their own reports count."""
    has_numbers: bool = False
    """A followed engine has reported a number."""

    def __post_init__(self) -> None:
        self.announced = max(self.announced, self.published)

    def label(self, number: int) -> str:
        """The label set on engines for a version of this lineage."""
        return f"{self.lineage}:{number}"

    def announce(self, lineage: str, number: int) -> None:
        """Record that the engines are about to load a version."""
        if lineage != self.lineage:
            self.lineage, self.published = lineage, number
        self.announced = max(number, self.published)

    def confirm(self, number: int) -> None:
        """Record that every engine has loaded a version."""
        self.published = self.announced = number

    def follow(self, labels: Labels, *, num_tokens: int) -> tuple[VersionSpan, ...]:
        """Spans as reported by an engine whose weights the trainer replaces itself.

        The trainer ends every request before an update, so one label applies to a whole answer. An engine
        that reports no number has its initial weights: the current version while no engine ever reported a
        number, otherwise (a restarted engine) an unknown one.
        """
        ends = [end for _, end in labels]
        if num_tokens == 0:
            return ()
        if not ends or ends[-1] != num_tokens:
            return (VersionSpan(UNKNOWN_VERSION, num_tokens),)
        of_start = UNKNOWN_VERSION if self.has_numbers else self.published
        numbers = [of_start if label in OF_START else parse_label(label, self.lineage) for label, _ in labels]
        self.has_numbers |= any(label not in OF_START for label, _ in labels)
        self.confirm(max(self.published, *numbers))
        return merge_spans(zip(numbers, ends, strict=True))

    def follow_answers(self, labels: Iterable[Any]) -> list[int]:
        """The versions of several answers with one label each; equal neighbours are merged."""
        told = [(None if label is None else str(label), end) for end, label in enumerate(labels, 1)]
        return [span.version for span in self.follow(told, num_tokens=len(told))]

    def are_not_the_runs(self, labels: Labels) -> bool:
        """Whether an engine has its initial weights, or a version that was never published."""
        return bool(labels) and all(
            label in OF_START or parse_label(label, self.lineage) > self.announced for label, _ in labels
        )

    def withdraw(self) -> None:
        """Record that the announced version was not loaded: its label is unknown from now on."""
        self.announced = self.published


def parse_label(label: str | None, lineage: str) -> int:
    """The number in a label: `lineage:number`, or a plain number, which counts as part of the lineage."""
    if label is None:
        return UNKNOWN_VERSION
    origin, separator, digits = label.rpartition(":")
    if separator and origin != lineage:
        return UNKNOWN_VERSION
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS
    return int(digits) if is_number else UNKNOWN_VERSION


def resolve_spans(
    labels: Labels, *, num_tokens: int, lineage: str, floor: int, ceiling: int, has_spans: bool
) -> tuple[VersionSpan, ...]:
    """Spans of version numbers that cover `num_tokens` tokens of one reply.

    Args:
        floor: the published version when the request was sent.
        ceiling: the announced version when the reply arrived.
        has_spans: the engine reports the version of every token; otherwise only the version at the reply's
            end, which is certain only if it equals the version at the request's start.
    """
    if num_tokens == 0:
        return ()
    ends = [end for _, end in labels]
    covers = bool(ends) and ends[-1] == num_tokens and all(a < b for a, b in itertools.pairwise([0, *ends]))
    if not covers:
        return (VersionSpan(UNKNOWN_VERSION, num_tokens),)
    numbers = [parse_label(label, lineage) for label, _ in labels]
    if not has_spans:
        certain = numbers[-1] == floor
        return (VersionSpan(floor if certain else UNKNOWN_VERSION, num_tokens),)
    return merge_spans(zip(_rising(numbers, floor, ceiling), ends, strict=True))


def _rising(numbers: Iterable[int], floor: int, ceiling: int) -> list[int]:
    """Keep numbers in the range that do not decrease; replace the others by unknown."""
    kept = []
    for number in numbers:
        known = floor <= number <= ceiling
        kept.append(number if known else UNKNOWN_VERSION)
        floor = number if known else floor
    return kept


def merge_spans(spans: Iterable[tuple[int, int]]) -> tuple[VersionSpan, ...]:
    """(version, end) pairs as spans; neighbours of one version are merged, empty spans removed."""
    merged: list[VersionSpan] = []
    for version, end in spans:
        if merged and merged[-1].version == version:
            merged[-1] = VersionSpan(version, end)
        elif end > (merged[-1].end if merged else 0):
            merged.append(VersionSpan(version, end))
    return tuple(merged)
