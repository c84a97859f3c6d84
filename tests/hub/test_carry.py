"""Steps whose samples do not divide over ranks and micro-batches: filled, or carried to the next step."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fa_rollout.hub.flow.books import Books, Place
from fa_rollout.hub.flow.flow import Step
from fa_rollout.hub.state.delivery import Terms, cut, remainder
from tests.hub.rig import VOCAB_SIZE, Rig, add_up
from tests.hub.test_books import commit_message, stream
from tests.hub.test_ranks import side_by_side
from tests.kit.scripted import Lengths, Script, ScriptedEngine
from trainer_hook.errors import UnsplittableBatch

MakeRig = Callable[..., Rig]
NUM_STEPS = 4
ONE_SAMPLE_EACH = {"max_tokens_per_micro_batch": 60}
"""All samples have about 50 tokens, so that a micro-batch holds one."""


@pytest.fixture(scope="module")
def even_engine() -> Iterator[ScriptedEngine]:
    script = Script(vocab_size=VOCAB_SIZE, lengths=Lengths(tokens=40), tokens_per_s=4000.0)
    with ScriptedEngine.start(script) as engine:
        yield engine


@pytest.fixture
def odd(tmp_path: Path, even_engine: ScriptedEngine) -> Callable[..., Rig]:
    """Three samples a step, for two ranks."""
    rollout = {"num_steps": NUM_STEPS, "groups_per_step": 3, "samples_per_group": 1, "staleness": 4}

    def make(*, remainder: str, rollout: dict[str, Any] = rollout, **changes: Any) -> Rig:
        trainer = {**ONE_SAMPLE_EACH, "remainder": remainder}
        return Rig(tmp_path / "run", even_engine, rollout=rollout, trainer=trainer, **changes)

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


def test_fill_trains_all_of_a_step_with_fillers(odd: MakeRig) -> None:
    with odd(remainder="fill") as run:
        steps = trained_by_step(parts_of_two_ranks(run))
        assert add_up(run.stop().counts)
    assert [len(groups) for groups, _ in steps] == [3, 3, 3, 3]
    assert [num_fillers for _, num_fillers in steps] == [1, 1, 1, 1]


def test_carry_leaves_the_youngest_groups_to_the_next_step_and_fills_the_last(
    odd: MakeRig, tmp_path: Path
) -> None:
    with odd(remainder="carry") as run:
        recorded = parts_of_two_ranks(run)
        assert add_up(run.stop().counts)
        carried = [event["groups"] for event in run.events("carried")]
    steps = trained_by_step(recorded)
    assert [len(groups) for groups, _ in steps] == [2, 2, 2, 3]
    assert [num_fillers for _, num_fillers in steps] == [0, 0, 0, 1]
    assert [len(groups) for groups in carried] == [1, 1, 1]
    trained = [group for groups, _ in steps for group in groups]
    assert len(set(trained)) == len(trained)
    for (group,), (later, _) in zip(carried, steps[1:], strict=True):
        assert group in later, "what is carried over is in the very next step"
    log = tmp_path / "recorded.jsonl"
    shutil.copy(run.folder / "events.jsonl", log)
    with odd(remainder="carry", run={"replay": str(log)}) as run:
        assert parts_of_two_ranks(run) == recorded


def test_what_could_not_be_trained_later_is_not_carried(odd: MakeRig) -> None:
    """At a staleness bound of 0 a group that is left over is lost for the next version."""
    strict = {"num_steps": NUM_STEPS, "groups_per_step": 3, "samples_per_group": 1, "staleness": 0}
    with odd(remainder="carry", rollout=strict) as run:
        steps = trained_by_step(parts_of_two_ranks(run))
        assert add_up(run.stop().counts)
        assert run.events("carried") == []
    assert [len(groups) for groups, _ in steps] == [3, 3, 3, 3]


def step_of(num_groups: int) -> Step:
    """A step of groups of one sample of two tokens."""
    books = Books(stream())
    books.take(num_groups)
    for name, group in books.groups.items():
        assert group.place is Place.ISSUED
        books.commit(commit_message(group, name))
    return Step(step=0, version=0, groups=list(books.groups.values()))


@pytest.mark.parametrize(
    ("num_groups", "num_ranks", "num_carried"),
    [(4, 2, 0), (5, 2, 1), (6, 4, 2), (7, 4, 3), (4, 4, 0), (11, 3, 2)],
)
def test_the_fewest_groups_go_without_which_no_filler_is_needed(
    num_groups: int, num_ranks: int, num_carried: int
) -> None:
    step = step_of(num_groups)
    terms = Terms(dp_size=num_ranks, max_tokens_per_micro_batch=2, oldest_allowed=None)
    names = remainder(step, terms, step.names[:0:-1])
    assert names == step.names[::-1][:num_carried]
    step.groups = [group for group in step.groups if group.group not in names]
    batches = cut(step, terms)
    assert not any(part.filler for batch in batches for parts in batch.micro_batches for part in parts)


def test_nothing_is_carried_where_that_does_not_help_and_too_few_are_refused_with_both_numbers() -> None:
    step = step_of(3)
    terms = Terms(dp_size=4, max_tokens_per_micro_batch=2, oldest_allowed=None)
    assert remainder(step, terms, step.names[:0:-1]) == []
    with pytest.raises(UnsplittableBatch, match="3 samples for 4 ranks"):
        cut(step, terms)
    only_the_last = step_of(7)
    assert remainder(only_the_last, terms, only_the_last.names[-1:]) == []
