"""Steps whose samples do not divide over ranks and micro-batches: filled."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fa_rollout.hub.flow.books import Books, GroupPlace
from fa_rollout.hub.flow.flow import Step
from fa_rollout.hub.state.delivery import Terms, cut
from tests.hub.rig import VOCAB_SIZE, Rig, add_up
from tests.hub.test_books import commit_message, stream
from tests.hub.test_ranks import side_by_side
from tests.kit.scripted import Lengths, Script, ScriptedEngine
from trainer_hook.errors import UnsplittableBatch

NUM_STEPS = 4
ONE_SAMPLE_EACH = {"max_tokens_per_micro_batch": 60}
"""All samples have about 50 tokens, so that a micro-batch holds one."""


@pytest.fixture(scope="module")
def even_engine() -> Iterator[ScriptedEngine]:
    script = Script(vocab_size=VOCAB_SIZE, lengths=Lengths(tokens=40), tokens_per_s=4000.0)
    with ScriptedEngine.start(script) as engine:
        yield engine


@pytest.fixture
def odd(tmp_path: Path, even_engine: ScriptedEngine) -> Callable[[], Rig]:
    """Three samples a step, for two ranks."""
    rollout = {"num_steps": NUM_STEPS, "groups_per_step": 3, "samples_per_group": 1, "staleness": 4}

    def make() -> Rig:
        return Rig(tmp_path / "run", even_engine, rollout=rollout, trainer=ONE_SAMPLE_EACH)

    return make


def parts_of_two_ranks(run: Rig) -> list[list[list[list[tuple[int, bool]]]]]:
    """By rank and step: micro-batches of (group, filler)."""
    parts: list[list[list[list[tuple[int, bool]]]]] = [[], []]

    def job(rank: int) -> None:
        with run.attach(rank, 2) as hook:
            for _ in range(NUM_STEPS):
                with hook.next_batch() as batch:
                    micro_batches = batch.micro_batches()
                    parts[rank].append([[(s.group, s.is_filler) for s in mb.samples] for mb in micro_batches])
                with hook.update_weights():
                    pass

    assert side_by_side(lambda: job(0), lambda: job(1)) == []
    return parts


def trained_by_step(parts: list[list[list[list[tuple[int, bool]]]]]) -> list[tuple[list[int], int]]:
    """By step: groups of both ranks, and the number of fillers."""
    steps = []
    for of_step in zip(*parts, strict=True):
        samples = [sample for rank in of_step for micro_batch in rank for sample in micro_batch]
        groups = sorted(group for group, is_filler in samples if not is_filler)
        steps.append((groups, sum(is_filler for _, is_filler in samples)))
    return steps


def test_fill_trains_all_of_a_step_with_fillers(odd: Callable[[], Rig]) -> None:
    with odd() as run:
        steps = trained_by_step(parts_of_two_ranks(run))
        assert add_up(run.stop().counts)
    assert [len(groups) for groups, _ in steps] == [3, 3, 3, 3]
    assert [num_fillers for _, num_fillers in steps] == [1, 1, 1, 1]


def step_of(num_groups: int) -> Step:
    """A step of groups of one sample of two tokens."""
    books = Books(stream())
    books.take(num_groups)
    for name, group in books.groups.items():
        assert group.place is GroupPlace.ISSUED
        books.commit(commit_message(group, name))
    return Step(step=0, version=0, groups=list(books.groups.values()))


def test_too_few_samples_are_refused_with_both_numbers() -> None:
    terms = Terms(dp_size=4, max_tokens_per_micro_batch=2, oldest_allowed=None)
    with pytest.raises(UnsplittableBatch, match="3 samples for 4 ranks"):
        cut(step_of(3), terms)
