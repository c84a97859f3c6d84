"""The ledger of groups: which prompt is where. Pure; no I/O, no clock.

Invariant: every group taken is in exactly one place (live, handed, or settled by one outcome), so that
`taken = trained + filtered + failed + dropped + live + handed` at any moment.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from fa_rollout.hub.flow.stream import Source, StreamEnd
from trainer_hook.messages import Assignment, Commit, Settlement


class GroupPlace(StrEnum):
    """Where a group is that is not settled."""

    QUEUED = "queued"
    """Taken and given back: issued again before new ones."""
    ISSUED = "issued"
    """The generator has it, no engine yet."""
    RUNNING = "running"
    COMMITTED = "committed"
    HANDED = "handed"
    """In the trainer's hands."""


@dataclass(slots=True, kw_only=True)
class Group:
    """One group that is not settled."""

    group: int
    attempt: int = 0
    place: GroupPlace = GroupPlace.QUEUED
    version: int | None = None
    """Under which its first sample was dispatched."""
    kept_version: int | None = None
    """Oldest version of the tokens that a checkpoint kept of it, while it is not committed."""
    commit: Commit | None = None
    num_overdue: int = 0
    """Attempts that came to be too old to be trained."""

    @property
    def begun_version(self) -> int | None:
        """Version of its oldest token, as far as that can be known before it is committed."""
        known = [version for version in (self.version, self.kept_version) if version is not None]
        return min(known, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The books at one moment; `taken` is the sum of all others."""

    taken: int
    queued: int
    issued: int
    running: int
    committed: int
    handed: int
    trained: int
    filtered: int
    failed: int
    dropped: int

    @property
    def live(self) -> int:
        """Groups at work or waiting for the trainer; those given back and not yet issued again are not."""
        return self.issued + self.running + self.committed


def _oldest_first(group: Group) -> tuple[bool, int, int]:
    """Those with tokens of old versions, which are due soon, then by their place in the data."""
    return group.kept_version is None, group.kept_version or 0, group.group


class Books:
    """Groups by id, the cursor into the stream, and the counts."""

    def __init__(self, stream: Source) -> None:
        self.stream = stream
        self.cursor = 0
        """First group never taken."""
        self.groups: dict[int, Group] = {}
        self.ends: Counter[StreamEnd] = Counter()
        self._places: Counter[GroupPlace] = Counter()
        self.has_kept = False
        """Some group may have tokens that a checkpoint kept."""
        self._num_seen = 0
        """Groups that were taken in any branch: all below have had an attempt."""
        self._last_attempts: dict[int, int] = {}
        """Of groups that have ended or were abandoned, where it is not 0: one that a checkpoint brings back
        goes on from there, since what is still said of an attempt before must not count for it."""

    # --- taking -----------------------------------------------------------------------------------

    @property
    def num_left(self) -> int | None:
        """Groups of the stream that were never taken; None when there is no end."""
        return None if self.stream.length is None else self.stream.length - self.cursor

    def take(self, num_groups: int) -> list[Assignment]:
        """Issue up to `num_groups`: those given back first, then new ones from the stream."""
        names = [g.group for g in sorted(self._at(GroupPlace.QUEUED), key=_oldest_first)[:num_groups]]
        num_new = num_groups - len(names)
        if self.num_left is not None:
            num_new = min(num_new, self.num_left)
        for name in range(self.cursor, self.cursor + num_new):
            self.groups[name] = Group(group=name, attempt=self._next_attempt(name))
            self._places[GroupPlace.QUEUED] += 1
            names.append(name)
        self.cursor += num_new
        self._num_seen = max(self._num_seen, self.cursor)
        for name in names:
            self._move(self.groups[name], GroupPlace.ISSUED)
        return [self.assignment(self.groups[name]) for name in names]

    def assignment(self, group: Group) -> Assignment:
        """What the generator needs to roll a group out."""
        epoch, row = self.stream.locate(group.group)
        return Assignment(group=group.group, attempt=group.attempt, epoch=epoch, prompt_index=row)

    # --- the generator's news ---------------------------------------------------------------------

    def dispatched(self, groups: Iterable[int], version: int) -> None:
        """The first sample of each group left for an engine."""
        for name in groups:
            group = self.groups.get(name)
            if group is not None and group.place is GroupPlace.ISSUED:
                group.version = version
                self._move(group, GroupPlace.RUNNING)

    def commit(self, message: Commit) -> bool:
        """A record arrived; False when it is not waited for (another attempt, or settled meanwhile)."""
        group = self._expected(message.group, message.attempt)
        if group is None:
            return False
        group.commit = message
        self._move(group, GroupPlace.COMMITTED)
        return True

    def settle(self, name: int, attempt: int, outcome: Settlement) -> bool:
        """A group ended without a record, or came back; False when it is not waited for."""
        group = self._expected(name, attempt)
        if group is None:
            return False
        if outcome is Settlement.RETURNED:
            self.requeue(group)
        else:
            self.end(group, StreamEnd(outcome.value))
        return True

    def requeue(self, group: Group) -> None:
        """Back in the data: it will be issued again as a further attempt."""
        group.attempt += 1
        group.version = None
        group.commit = None
        self._move(group, GroupPlace.QUEUED)

    def generator_died(self) -> list[Group]:
        """Requeue all that the generator held; committed groups stay."""
        lost = [*self._at(GroupPlace.ISSUED), *self._at(GroupPlace.RUNNING)]
        for group in lost:
            self.requeue(group)
        return lost

    # --- the trainer's side -----------------------------------------------------------------------

    def is_committed(self, name: int) -> bool:
        """Whether a batch may take this group."""
        return name in self.groups and self.groups[name].place is GroupPlace.COMMITTED

    def committed(self) -> list[Group]:
        """Groups that a batch may take."""
        return self._at(GroupPlace.COMMITTED)

    def issued(self) -> list[Group]:
        """Groups that the generator has queued."""
        return self._at(GroupPlace.ISSUED)

    def running(self) -> list[Group]:
        """Groups that engines work on."""
        return self._at(GroupPlace.RUNNING)

    def begun(self) -> list[Group]:
        """Groups at the generator that have tokens: engines made them, or a checkpoint kept them."""
        issued = [g for g in self.issued() if g.kept_version is not None] if self.has_kept else []
        return [*self.running(), *issued]

    def hand(self, groups: Iterable[int]) -> None:
        """These groups are in the trainer's hands."""
        for name in groups:
            self._move(self.groups[name], GroupPlace.HANDED)

    def take_back(self, groups: Iterable[int]) -> None:
        """The trainer did not train them, and their records are intact: given again."""
        for name in groups:
            self._move(self.groups[name], GroupPlace.COMMITTED)

    def trained(self, groups: Iterable[int]) -> None:
        """The trainer's step over these groups is done."""
        for name in groups:
            self.end(self.groups[name], StreamEnd.TRAINED)

    def end(self, group: Group, end: StreamEnd) -> None:
        """Settle a group."""
        self._remember(group)
        self._places[group.place] -= 1
        self.ends[end] += 1
        del self.groups[group.group]
        self.stream.settled(group.group, end)

    # --- the whole --------------------------------------------------------------------------------

    def counts(self) -> Counts:
        """The books now."""
        return Counts(
            taken=self.cursor,
            **{place.value: self._places[place] for place in GroupPlace},
            **{end.value: self.ends[end] for end in StreamEnd},
        )

    def state(self) -> tuple[int, list[int], dict[str, int]]:
        """What a checkpoint keeps: the cursor, what is unfinished below it, and the counts of ends."""
        return self.cursor, sorted(self.groups), {end.value: self.ends[end] for end in StreamEnd}

    def rewind(self, cursor: int, unfinished: Iterable[int], ends: dict[str, int]) -> list[Group]:
        """Go to a checkpoint's books; returns the live groups that it does not know as live.

        Groups that the checkpoint counts as unfinished and that stand here stay where they are, others of
        them are queued anew. The groups returned are no longer in the books: their branch is abandoned.
        """
        wanted = set(unfinished)
        abandoned = [group for name, group in self.groups.items() if name not in wanted]
        kept = {name: group for name, group in self.groups.items() if name in wanted}
        self.cursor = cursor
        self._num_seen = max(self._num_seen, cursor)
        for group in abandoned:
            self._remember(group)
        again = {name: Group(group=name, attempt=self._next_attempt(name)) for name in wanted - kept.keys()}
        self.groups = kept | again
        self._places = Counter(group.place for group in self.groups.values())
        self.ends = Counter({StreamEnd(name): number for name, number in ends.items()})
        return abandoned

    def _remember(self, group: Group) -> None:
        if group.attempt:
            self._last_attempts[group.group] = group.attempt

    def _next_attempt(self, name: int) -> int:
        return 0 if name >= self._num_seen else self._last_attempts.get(name, 0) + 1

    def _expected(self, name: int, attempt: int) -> Group | None:
        group = self.groups.get(name)
        if (
            group is None
            or group.attempt != attempt
            or group.place not in (GroupPlace.ISSUED, GroupPlace.RUNNING)
        ):
            return None
        return group

    def _move(self, group: Group, place: GroupPlace) -> None:
        self._places[group.place] -= 1
        self._places[place] += 1
        group.place = place

    def _at(self, place: GroupPlace) -> list[Group]:
        if not self._places[place]:
            return []
        return [group for group in self.groups.values() if group.place is place]
