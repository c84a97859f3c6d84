"""Groups that grow too old for the staleness bound: settled where they are committed, stopped where they run.

In: books, and where the run stands. Out: changes of the books, freed records, groups that are to be stopped.
Invariant: a group that is given up is noted in the log, and its record leaves the ring.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fa_rollout.account import events
from fa_rollout.account.events import Note
from fa_rollout.hub.flow import composition
from fa_rollout.hub.flow.books import Books, Group
from fa_rollout.hub.flow.meter import Meter
from fa_rollout.hub.flow.stream import StreamEnd
from shm import RingTable


@dataclass(slots=True, kw_only=True)
class Ageing:
    """Looks after the age of groups."""

    books: Books
    table: RingTable
    rules: composition.Rules
    max_attempts: int
    has_surplus: bool
    meter: Meter
    note: Note
    _swept: tuple[int, int, bool] = field(default=(0, 0, False))
    """Where the run stood when hopeless groups were last looked for."""

    def ready(self) -> list[composition.ReadyGroup]:
        """Committed groups."""
        return [
            composition.ReadyGroup(group=g.group, oldest_version=g.commit.oldest_version)
            for g in self.books.committed()
            if g.commit is not None
        ]

    def running(self) -> list[composition.RunningGroup]:
        """Groups that have tokens and no record."""
        return _ages(self.books.begun())

    def settle_overdue(self, version: int) -> None:
        """Committed groups past the bound end, or start again."""
        for name in composition.overdue(self.rules, version, self.ready()):
            group = self.books.groups[name]
            assert group.commit is not None
            reason = f"oldest token of version {group.commit.oldest_version}"
            if self._starts_again(group):
                self.table.discard(group.commit.sequence)
                self._requeue(group, reason)
            else:
                self.drop(group, reason)

    def drop(self, group: Group, reason: str) -> None:
        """End a committed group untrained."""
        assert group.commit is not None
        self.table.discard(group.commit.sequence)
        self.note(events.GroupDropped(group=group.group, attempt=group.attempt, reason=reason))
        self.meter.dropped_tokens += sum(group.commit.response_lens)
        self.books.end(group, StreamEnd.DROPPED)

    def take_hopeless(self, version: int, training_version: int, *, all_composed: bool) -> list[int]:
        """Groups that the generator is to stop, since no step can train them any more; each sweep once.

        Under `retry` they go back to the data here, under `drop` when the generator has let go of them.

        Args:
            training_version: the version that trains the next step.
        """
        state = (version, training_version, all_composed)
        if state == self._swept:
            return []
        self._swept = state
        if all_composed:
            return [group.group for group in [*self.books.running(), *self.books.issued()]]
        late = composition.hopeless(self.rules, training_version, _ages(self.books.running()))
        for name in late:
            if self._starts_again(self.books.groups[name]):
                self._requeue(self.books.groups[name], "no step can train it within the bound")
        return list(late)

    def _requeue(self, group: Group, reason: str) -> None:
        self.note(events.GroupReturned(group=group.group, attempt=group.attempt, reason=reason))
        group.num_overdue += 1
        self.books.requeue(group)

    def _starts_again(self, group: Group) -> bool:
        """Whether an overdue group goes back to the data.

        Under `wait` without a surplus none becomes overdue but by accident, such as an engine that died and
        came back without the run's weights; and prompts that are fed are never lost. To try a surplus again
        would favour short answers.
        """
        is_waiting = self.rules.policy == "wait"
        if is_waiting and self.books.stream.is_open:
            return True
        may_try = self.rules.policy == "retry" or (is_waiting and not self.has_surplus)
        return may_try and group.num_overdue < self.max_attempts - 1


def _ages(running: Sequence[Group]) -> list[composition.RunningGroup]:
    return [
        composition.RunningGroup(group=group.group, version=group.begun_version)
        for group in running
        if group.begun_version is not None
    ]
