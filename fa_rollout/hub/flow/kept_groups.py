"""What a loaded checkpoint kept of unfinished groups, until each is in the ring again or has ended.

In: a file and its index. Out: for a group that is issued, where its head start lies in the file.
Invariant: nothing that the staleness bound forbids is ever used; the file is removed with its last group.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from fa_rollout.hub.flow import composition
from fa_rollout.hub.flow.books import Books, GroupPlace
from trainer_hook.messages import Assignment, KeptEntry, KeptKind
from trainer_hook.record import UNKNOWN_VERSION

_WAITING = (GroupPlace.QUEUED, GroupPlace.ISSUED, GroupPlace.RUNNING)


class Kept:
    """Head starts of groups that are not committed yet."""

    def __init__(self, books: Books, rules: composition.Rules) -> None:
        self._books = books
        self._rules = rules
        self._entries: dict[int, KeptEntry] = {}
        self.path = ""

    def __len__(self) -> int:
        return len(self._entries)

    def hold(self, path: str, entries: Iterable[KeptEntry], *, version: int) -> dict[KeptKind, list[int]]:
        """Take a checkpoint's groups over from whatever was held before; returns those of use, by kind.

        A group that stands in the ring needs none, and tokens of later versions than the checkpoint's are of
        no branch that is known.
        """
        self.close()
        self.path = path
        by_worth = sorted(entries, key=lambda entry: entry.kind is KeptKind.RECORD)
        for entry in by_worth:  # of two for one group the later stays
            group = self._books.groups.get(entry.group)
            is_known = entry.oldest_version > UNKNOWN_VERSION and entry.newest_version <= version
            if group is not None and group.place is GroupPlace.QUEUED and is_known:
                self._entries[entry.group] = entry
                group.kept_version = entry.oldest_version
        self._remove_if_empty()
        return {
            kind: sorted(name for name, entry in self._entries.items() if entry.kind is kind)
            for kind in KeptKind
        }

    def head_starts(self, assignments: Sequence[Assignment], *, training_version: int) -> list[KeptEntry]:
        """What the generator gets along with these groups."""
        found = []
        for assignment in assignments:
            entry = self._entries.get(assignment.group)
            if entry is None:
                continue
            if composition.may_train(self._rules, training_version, entry.oldest_version):
                found.append(entry)
            else:
                self._forget(assignment.group)
        return found

    def prune(self) -> None:
        """Forget groups that are in the ring or have ended; called now and then."""
        for name in list(self._entries):
            group = self._books.groups.get(name)
            if group is None or group.place not in _WAITING:
                self._forget(name)
        self._remove_if_empty()

    def close(self) -> None:
        """Forget all."""
        for name in list(self._entries):
            self._forget(name)
        self._remove_if_empty()

    def _forget(self, name: int) -> None:
        del self._entries[name]
        group = self._books.groups.get(name)
        if group is not None:
            group.kept_version = None

    def _remove_if_empty(self) -> None:
        self._books.has_kept = bool(self._entries)
        if self.path and not self._entries:
            Path(self.path).unlink(missing_ok=True)
            self.path = ""
