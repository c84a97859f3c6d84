"""The ledger: every group taken is in exactly one place, whatever happens in whatever order."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fa_rollout.hub.flow.books import Books, Group, GroupPlace
from fa_rollout.hub.flow.stream import Stream
from trainer_hook.messages import Commit, Settlement


def commit_message(group: Group, sequence: int) -> Commit:
    return Commit(
        incarnation=1,
        sequence=sequence,
        position=sequence * 64,
        length=64,
        lowest_open=sequence * 64 + 64,
        group=group.group,
        attempt=group.attempt,
        oldest_version=0,
        newest_version=0,
        prompt_lens=[1],
        response_lens=[1],
        loss_lens=[1],
        spans=[[(0, 1, 1)]],
        rewards=[0.0],
    )


def stream(num_prompts: int = 7, epochs: int | None = None) -> Stream:
    return Stream(
        num_prompts=num_prompts,
        epochs=epochs,
        order=lambda epoch: np.random.default_rng(epoch).permutation(num_prompts),
    )


class LedgerMachine(RuleBasedStateMachine):
    """Random lives of groups; the books must add up after each event."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Books(stream())
        self.sequence = 0
        self.handed: list[list[int]] = []
        self.saved: tuple[int, list[int], dict[str, int]] | None = None
        self.attempts: set[tuple[int, int]] = set()

    def _some(self, place: GroupPlace, pick: int) -> Group | None:
        groups = [g for g in self.books.groups.values() if g.place is place]
        return groups[pick % len(groups)] if groups else None

    @rule(number=st.integers(0, 5))
    def take(self, number: int) -> None:
        issued = self.books.take(number)
        assert len(issued) == number
        for assignment in issued:
            attempt = (assignment.group, assignment.attempt)
            assert attempt not in self.attempts, "what is said of one attempt must not count for another"
            self.attempts.add(attempt)
            epoch, _ = divmod(assignment.group, 7)
            assert assignment.epoch == epoch
            assert 0 <= assignment.prompt_index < 7

    @rule(pick=st.integers(0, 50), version=st.integers(0, 3))
    def dispatch(self, pick: int, version: int) -> None:
        group = self._some(GroupPlace.ISSUED, pick)
        if group:
            self.books.dispatched([group.group], version)
            assert group.place is GroupPlace.RUNNING

    @rule(pick=st.integers(0, 50))
    def commit(self, pick: int) -> None:
        group = self._some(GroupPlace.RUNNING, pick)
        if group:
            self.sequence += 1
            message = commit_message(group, self.sequence)
            assert self.books.commit(message)
            assert not self.books.commit(message), "a record must count once"

    @rule(pick=st.integers(0, 50), outcome=st.sampled_from(list(Settlement)))
    def settle(self, pick: int, outcome: Settlement) -> None:
        group = self._some(GroupPlace.RUNNING, pick)
        if group:
            name, attempt = group.group, group.attempt
            assert self.books.settle(name, attempt, outcome)
            assert not self.books.settle(name, attempt, outcome), "a settlement must count once"

    @rule()
    def generator_dies(self) -> None:
        committed = {g.group for g in self.books.committed()}
        self.books.generator_died()
        assert committed == {g.group for g in self.books.committed()}
        assert not self.books.running()

    @rule(number=st.integers(1, 4))
    def hand(self, number: int) -> None:
        names = [g.group for g in self.books.committed()][:number]
        if names:
            self.books.hand(names)
            self.handed.append(names)

    @precondition(lambda self: self.handed)
    @rule(back=st.booleans())
    def finish(self, back: bool) -> None:
        names = self.handed.pop(0)
        if back:
            self.books.take_back(names)
        else:
            self.books.trained(names)

    @rule()
    def save(self) -> None:
        self.saved = self.books.state()

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self) -> None:
        assert self.saved is not None
        for names in self.handed:
            self.books.take_back(names)
        self.handed.clear()
        self.books.rewind(*self.saved)
        assert sorted(self.books.groups) == self.saved[1]

    @invariant()
    def the_books_add_up(self) -> None:
        counts = self.books.counts()
        settled = counts.trained + counts.filtered + counts.failed + counts.dropped
        assert counts.taken == settled + counts.queued + counts.live + counts.handed
        for place in GroupPlace:
            assert getattr(counts, place.value) == sum(g.place is place for g in self.books.groups.values())


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_every_prompt_is_taken_once_per_epoch_through_any_number_of_wraps() -> None:
    books = Books(stream(num_prompts=3))
    rows = [a.prompt_index for _ in range(3) for a in books.take(8)]
    assert len(rows) == 24
    for epoch in range(8):
        assert sorted(rows[epoch * 3 : epoch * 3 + 3]) == [0, 1, 2]


def test_the_data_ends_after_its_epochs() -> None:
    books = Books(stream(num_prompts=5, epochs=2))
    assert len(books.take(8)) == 8
    assert len(books.take(8)) == 2
    assert books.num_left == 0
    assert books.take(8) == []


def test_work_given_back_goes_ahead_of_new_work_and_counts_its_attempt() -> None:
    books = Books(stream())
    books.take(3)
    books.settle(1, 0, Settlement.RETURNED)
    issued = books.take(2)
    assert [(a.group, a.attempt) for a in issued] == [(1, 1), (3, 0)]


def test_an_answer_of_an_earlier_attempt_is_not_taken_for_the_present_one() -> None:
    books = Books(stream())
    books.take(1)
    old = commit_message(books.groups[0], 1)
    books.generator_died()
    books.take(1)
    assert not books.commit(old)
    assert books.commit(commit_message(books.groups[0], 2))


def test_what_is_said_of_an_abandoned_group_does_not_count_for_its_next_attempt() -> None:
    books = Books(Stream(num_prompts=8, epochs=None, order=lambda epoch: np.arange(8)))
    (old,) = books.take(1)
    assert [group.group for group in books.rewind(0, [], {})] == [0]
    (new,) = books.take(1)
    assert new.group == old.group
    assert new.attempt > old.attempt
    assert not books.settle(old.group, old.attempt, Settlement.DROPPED)
    assert books.settle(new.group, new.attempt, Settlement.RETURNED)


def test_what_was_trained_and_comes_back_goes_on_from_its_last_attempt() -> None:
    books = Books(stream())
    for attempt in range(2):
        issued = books.take(2)
        assert [(a.group, a.attempt) for a in issued] == [(0, attempt), (1, attempt)]
        books.generator_died()
    books.take(2)
    for name in (0, 1):
        books.settle(name, 2, Settlement.FILTERED)
    books.rewind(2, [0], {"filtered": 1})
    assert [(a.group, a.attempt) for a in books.take(1)] == [(0, 3)]
    books.rewind(0, [], {})
    assert [(a.group, a.attempt) for a in books.take(3)] == [(0, 4), (1, 3), (2, 0)]
