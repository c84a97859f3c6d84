"""Which weight version made which token. Pure: labels that an engine told in, numbered spans out.

Invariant: a number is given only where it is certain. A label of another lineage, one that is no number, one
above what was ever announced to the engines, and one below what every engine had confirmed when the request
left (an engine that was restarted, or fell back) all count as unknown, never as current.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fa_rollout.client.engine.labels import OF_START
from trainer_hook.record import UNKNOWN_VERSION, VersionSpan

_MAX_DIGITS = 18
"""Of a number that fits 64 bits with its sign, as records and messages hold it."""

Labels = Sequence[tuple[str | None, int]]
"""(label, end) over the output tokens of one reply; ends as in `VersionSpan`."""


@dataclass(slots=True)
class VersionBook:
    """Where the run's weight versions stand, as the engines confirmed them."""

    lineage: str
    published: int
    """Every engine has confirmed it: no token sampled after this moment may be older."""
    announced: int = -1
    """The newest that any engine may hold; above `published` while an update is under way."""
    follows: bool = False
    """Somebody else gives the engines their weights: what they say of themselves counts."""
    has_numbers: bool = False
    """An engine that is followed has told a number."""

    def __post_init__(self) -> None:
        self.announced = max(self.announced, self.published)

    def label(self, number: int) -> str:
        """The text that engines are given for a version of this lineage."""
        return f"{self.lineage}:{number}"

    def announce(self, lineage: str, number: int) -> None:
        """The engines are about to load a version."""
        if lineage != self.lineage:
            self.lineage, self.published = lineage, number
        self.announced = max(number, self.published)

    def confirm(self, number: int) -> None:
        """Every engine has loaded a version."""
        self.published = self.announced = number

    def follow(self, labels: Labels, *, num_tokens: int) -> tuple[VersionSpan, ...]:
        """Spans as the engine told them, for engines whose weights somebody else replaces.

        He ends every request before he does, so that one label is true of a whole answer. An engine that
        tells no number has the weights of its own start. As long as none ever told one these are the current
        ones; if others did, it was started anew, and they are unknown.
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
        """The versions that several answers told, a label each; of neighbours with the same one, once."""
        told = [(None if label is None else str(label), end) for end, label in enumerate(labels, 1)]
        return [span.version for span in self.follow(told, num_tokens=len(told))]

    def are_not_the_runs(self, labels: Labels) -> bool:
        """Whether an engine has the weights of its own start, or a version that was never published."""
        return bool(labels) and all(
            label in OF_START or parse_label(label, self.lineage) > self.announced for label, _ in labels
        )

    def withdraw(self) -> None:
        """The announced version did not come: a token that claims it is of an unknown one."""
        self.announced = self.published


def parse_label(label: str | None, lineage: str) -> int:
    """Number of a label: `lineage:number`, or a plain number, which counts as one of the lineage."""
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
        floor: the published version when the request left.
        ceiling: the announced version when the reply came.
        has_spans: the engine tells the version of every token; else it tells the one at the reply's end, and
            that is certain only where it equals the one at the request's start.
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
    """The numbers that lie in the range and do not fall; the others as unknown."""
    kept = []
    for number in numbers:
        known = floor <= number <= ceiling
        kept.append(number if known else UNKNOWN_VERSION)
        floor = number if known else floor
    return kept


def merge_spans(spans: Iterable[tuple[int, int]]) -> tuple[VersionSpan, ...]:
    """(version, end) pairs as spans, neighbours of one version joined, empty ones left out."""
    merged: list[VersionSpan] = []
    for version, end in spans:
        if merged and merged[-1].version == version:
            merged[-1] = VersionSpan(version, end)
        elif end > (merged[-1].end if merged else 0):
            merged.append(VersionSpan(version, end))
    return tuple(merged)
