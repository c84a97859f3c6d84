"""Version spans: a number is given only where it is certain."""

import pytest

from fa_rollout.generator.turns.versions import VersionBook, merge_spans, parse_label, resolve_spans
from trainer_hook.record import UNKNOWN_VERSION, VersionSpan


@pytest.mark.parametrize(
    ("label", "number"),
    [
        ("run:0", 0),
        ("run:17", 17),
        ("17", 17),
        ("other:17", UNKNOWN_VERSION),
        ("default", UNKNOWN_VERSION),
        ("run:", UNKNOWN_VERSION),
        ("run:-3", UNKNOWN_VERSION),
        ("run:3.5", UNKNOWN_VERSION),
        ("run:\u0663", UNKNOWN_VERSION),
        ("run:" + 18 * "9", 10**18 - 1),
        ("run:" + 19 * "9", UNKNOWN_VERSION),
        (5000 * "9", UNKNOWN_VERSION),
        ("", UNKNOWN_VERSION),
        (None, UNKNOWN_VERSION),
    ],
)
def test_a_label_is_a_number_of_this_lineage_or_unknown(label: str | None, number: int) -> None:
    assert parse_label(label, "run") == number


def test_a_lineage_may_hold_a_colon() -> None:
    assert parse_label("a:b:4", "a:b") == 4


SPANNED = [
    ("one version", [("run:3", 9)], [(3, 9)]),
    ("an update in the middle", [("run:3", 5), ("run:4", 9)], [(3, 5), (4, 9)]),
    ("plain numbers", [("3", 5), ("4", 9)], [(3, 5), (4, 9)]),
    ("above what was announced", [("run:3", 5), ("run:6", 9)], [(3, 5), (UNKNOWN_VERSION, 9)]),
    ("below what every engine had", [("run:2", 9)], [(UNKNOWN_VERSION, 9)]),
    ("a number that falls", [("run:4", 5), ("run:3", 9)], [(4, 5), (UNKNOWN_VERSION, 9)]),
    ("back to the checkpoint", [("run:3", 5), ("default", 9)], [(3, 5), (UNKNOWN_VERSION, 9)]),
    ("no version", [(None, 9)], [(UNKNOWN_VERSION, 9)]),
    ("neighbours of one version", [("run:3", 5), ("3", 9)], [(3, 9)]),
    ("spans that do not cover", [("run:3", 5)], [(UNKNOWN_VERSION, 9)]),
    ("spans beyond the tokens", [("run:3", 12)], [(UNKNOWN_VERSION, 9)]),
    ("ends that do not rise", [("run:3", 5), ("run:4", 5), ("run:4", 9)], [(UNKNOWN_VERSION, 9)]),
    ("no span at all", [], [(UNKNOWN_VERSION, 9)]),
]


@pytest.mark.parametrize(
    ("labels", "spans"), [case[1:] for case in SPANNED], ids=[case[0] for case in SPANNED]
)
def test_spans_are_numbers_between_the_published_and_the_announced_version(
    labels: list[tuple[str | None, int]], spans: list[tuple[int, int]]
) -> None:
    found = resolve_spans(labels, num_tokens=9, lineage="run", floor=3, ceiling=5, has_spans=True)
    assert [(span.version, span.end) for span in found] == spans


@pytest.mark.parametrize(
    ("label", "version"), [("run:3", 3), ("run:4", UNKNOWN_VERSION), (None, UNKNOWN_VERSION)]
)
def test_without_spans_a_version_is_certain_only_if_it_is_the_same_at_both_ends(
    label: str | None, version: int
) -> None:
    found = resolve_spans([(label, 9)], num_tokens=9, lineage="run", floor=3, ceiling=4, has_spans=False)
    assert found == (VersionSpan(version, 9),)


def test_no_tokens_have_no_spans() -> None:
    assert resolve_spans([], num_tokens=0, lineage="run", floor=3, ceiling=3, has_spans=True) == ()


def test_empty_spans_are_left_out() -> None:
    assert merge_spans([(1, 0), (2, 4), (3, 4), (3, 6)]) == (VersionSpan(2, 4), VersionSpan(3, 6))


def test_an_announced_version_is_possible_and_a_withdrawn_one_is_not() -> None:
    book = VersionBook(lineage="run", published=3)
    assert book.announced == 3
    book.announce("run", 4)
    assert (book.published, book.announced) == (3, 4)
    book.withdraw()
    assert (book.published, book.announced) == (3, 3)
    book.announce("run", 4)
    book.confirm(4)
    assert (book.published, book.announced) == (4, 4)


def test_a_new_lineage_begins_at_its_own_number() -> None:
    book = VersionBook(lineage="old", published=30)
    book.announce("new", 7)
    assert (book.lineage, book.published, book.announced) == ("new", 7, 7)
