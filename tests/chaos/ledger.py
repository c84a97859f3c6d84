"""The log of a job's launches, read against the rules of the ledger.

In: events. Out: nothing, or an AssertionError that names the rule, the event and its number. One hub's life
is from `began` on; a hub that was killed leaves its last second unwritten, so a life may end anywhere.
"""

from typing import Any

Event = dict[str, Any]

_GIVEN_BACK = ("returned", "refused")
_ENDS = ("filtered", "failed", "dropped")


class Life:
    """The places of all groups, as one hub's events tell them."""

    def __init__(self) -> None:
        self.place: dict[int, str] = {}
        self.attempt: dict[int, int] = {}
        """Issued last; what a checkpoint brings back goes on from there."""
        self.step_groups: dict[int, list[int]] = {}
        self.trained: set[int] = set()
        self.ended: dict[int, str] = {}

    def take(self, event: Event) -> None:
        handler = getattr(self, f"_{event['event']}", None)
        if handler is not None:
            handler(event)

    def _move(self, group: int, allowed: tuple[str, ...], place: str) -> None:
        found = self.place.get(group, "new")
        assert found in allowed, f"group {group} goes to {place} from one of {allowed}, found {found}"
        self.place[group] = place

    def _issued(self, event: Event) -> None:
        for group, attempt in zip(event["groups"], event["attempts"], strict=True):
            assert group not in self.trained, f"group {group} is trained, and issued again"
            assert group not in self.ended, f"group {group} has ended, and is issued again"
            self._move(group, ("new", "queued"), "issued")
            assert attempt > self.attempt.get(group, -1), "attempts rise"
            self.attempt[group] = attempt

    def _committed(self, event: Event) -> None:
        assert event["attempt"] == self.attempt[event["group"]], "a record is of the attempt that was issued"
        self._move(event["group"], ("issued",), "committed")

    def _refused(self, event: Event) -> None:
        raise AssertionError(f"no record is ever refused: {event}")

    def _returned(self, event: Event) -> None:
        if "group" in event:
            self._move(event["group"], ("issued", "committed"), "queued")
            return
        for group in event["groups"]:
            self._move(group, ("handed",), "committed")

    def _filtered(self, event: Event) -> None:
        self._end(event)

    def _failed(self, event: Event) -> None:
        self._end(event)

    def _dropped(self, event: Event) -> None:
        self._end(event)

    def _end(self, event: Event) -> None:
        self._move(event["group"], ("issued", "committed"), event["event"])
        self.ended[event["group"]] = f"{event['event']}: {event.get('reason', '')}"

    def _generator_died(self, event: Event) -> None:
        for group in event["requeued"]:
            self._move(group, ("issued",), "queued")

    def _composed(self, event: Event) -> None:
        self.step_groups[event["step"]] = event["groups"]
        for group in event["groups"]:
            self._move(group, ("committed",), "handed")
        ranks = event["ranks"]
        assert len({len(micro_batches) for micro_batches in ranks}) == 1, "equal numbers of micro-batches"
        parts = [tuple(part[:2]) for rank in ranks for parts in rank for part in parts if not part[2]]
        assert len(set(parts)) == len(parts), "no sample is given to two ranks"
        assert {group for group, _ in parts} == set(event["groups"]), "all samples of a step are given out"

    def _trained(self, event: Event) -> None:
        assert event["groups"] == self.step_groups[event["step"]], "a step is trained as it was composed"
        for group in event["groups"]:
            self._move(group, ("handed",), "trained")
            self.trained.add(group)

    def _left(self, event: Event) -> None:
        for group in event.get("taken_back", []):
            self._move(group, ("handed",), "committed")

    def _loaded(self, event: Event) -> None:
        """The books of the checkpoint count from here on."""
        kept, unfinished = set(event["kept"]), set(event["unfinished"])
        for group in kept:
            assert self.place.get(group) in ("committed", "handed"), f"group {group} has no record"
        for name in ("restored", "resumed"):
            assert set(event[name]) <= unfinished - kept, "what a checkpoint kept is unfinished, and not here"
        known = {group: "committed" if group in kept else "queued" for group in unfinished}
        self.trained = {group for group in range(event["cursor"]) if group not in unfinished}
        self.ended = {}
        self.place = known

    def _ended(self, event: Event) -> None:
        counts = event["counts"]
        total = sum(number for name, number in counts.items() if name != "taken")
        assert counts["taken"] == total, f"the counts add up: {counts}"


def check(events: list[Event]) -> dict[int, str]:
    """Go through the lives of all hubs; returns the groups that ended untrained, and how."""
    life, ended = Life(), {}
    for number, event in enumerate(events):
        if event["event"] == "began":
            life = Life()
        try:
            life.take(event)
        except AssertionError as error:
            raise AssertionError(f"event {number}, {event}: {error}") from error
        ended |= life.ended
    return ended
