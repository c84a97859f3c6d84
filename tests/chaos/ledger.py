"""The log of a job's launches, read against the rules of the ledger.

In: events. Out: nothing, or an AssertionError that names the rule, the event and its number. One hub's life
is from `began` on; a hub that was killed leaves its last second unwritten, so a life may end anywhere.
"""

from collections.abc import Iterable
from functools import singledispatchmethod

from fa_rollout.account import events
from fa_rollout.account.events import Event


class Life:
    """The places of all groups, as one hub's events tell them."""

    def __init__(self) -> None:
        self.place: dict[int, str] = {}
        self.attempt: dict[int, int] = {}
        """Issued last; what a checkpoint brings back goes on from there."""
        self.step_groups: dict[int, list[int]] = {}
        self.trained: set[int] = set()
        self.ended: dict[int, str] = {}

    @singledispatchmethod
    def take(self, event: Event) -> None:
        """An event that moves no group."""

    def _move(self, group: int, allowed: tuple[str, ...], place: str) -> None:
        found = self.place.get(group, "new")
        assert found in allowed, f"group {group} goes to {place} from one of {allowed}, found {found}"
        self.place[group] = place

    @take.register
    def _issued(self, event: events.GroupsIssued) -> None:
        for group, attempt in zip(event.groups, event.attempts, strict=True):
            assert group not in self.trained, f"group {group} is trained, and issued again"
            assert group not in self.ended, f"group {group} has ended, and is issued again"
            self._move(group, ("new", "queued"), "issued")
            assert attempt > self.attempt.get(group, -1), "attempts rise"
            self.attempt[group] = attempt

    @take.register
    def _committed(self, event: events.GroupCommitted) -> None:
        assert event.attempt == self.attempt[event.group], "a record is of the attempt that was issued"
        self._move(event.group, ("issued",), "committed")

    @take.register
    def _refused(self, event: events.RecordRefused) -> None:
        raise AssertionError(f"no record is ever refused: {event}")

    @take.register
    def _returned(self, event: events.GroupReturned) -> None:
        self._move(event.group, ("issued", "committed"), "queued")

    @take.register
    def _step_returned(self, event: events.StepReturned) -> None:
        for group in event.groups:
            self._move(group, ("handed",), "committed")

    @take.register
    def _lost(self, event: events.GroupLost) -> None:
        self._move(event.group, ("issued", "committed"), event.outcome)
        self.ended[event.group] = f"{event.outcome}: {event.reason}"

    @take.register
    def _generator_died(self, event: events.GeneratorDied) -> None:
        for group in event.requeued:
            self._move(group, ("issued",), "queued")

    @take.register
    def _composed(self, event: events.StepComposed) -> None:
        self.step_groups[event.step] = event.groups
        for group in event.groups:
            self._move(group, ("committed",), "handed")
        ranks = event.ranks
        assert len({len(micro_batches) for micro_batches in ranks}) == 1, "equal numbers of micro-batches"
        parts = [tuple(part[:2]) for rank in ranks for parts in rank for part in parts if not part[2]]
        assert len(set(parts)) == len(parts), "no sample is given to two ranks"
        assert {group for group, _ in parts} == set(event.groups), "all samples of a step are given out"

    @take.register
    def _trained(self, event: events.StepTrained) -> None:
        assert event.groups == self.step_groups[event.step], "a step is trained as it was composed"
        for group in event.groups:
            self._move(group, ("handed",), "trained")
            self.trained.add(group)

    @take.register
    def _loaded(self, event: events.StateRestored) -> None:
        """The books of the checkpoint count from here on."""
        kept, unfinished = set(event.kept), set(event.unfinished)
        for group in kept:
            assert self.place.get(group) in ("committed", "handed"), f"group {group} has no record"
        for names in (event.restored, event.resumed):
            assert set(names) <= unfinished - kept, "what a checkpoint kept is unfinished, and not here"
        known = {group: "committed" if group in kept else "queued" for group in unfinished}
        self.trained = {group for group in range(event.cursor) if group not in unfinished}
        self.ended = {}
        self.place = known

    @take.register
    def _ended(self, event: events.HubEnded) -> None:
        counts = event.counts
        total = sum(number for name, number in counts.items() if name != "taken")
        assert counts["taken"] == total, f"the counts add up: {counts}"


def check(log: Iterable[Event]) -> dict[int, str]:
    """Go through the lives of all hubs; returns the groups that ended untrained, and how."""
    life, ended = Life(), dict[int, str]()
    for number, event in enumerate(log):
        if isinstance(event, events.HubBegan):
            life = Life()
        try:
            life.take(event)
        except AssertionError as error:
            raise AssertionError(f"event {number}, {event}: {error}") from error
        ended |= life.ended
    return ended
