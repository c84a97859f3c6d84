"""Which groups make the next batch. Pure: state in, decision out.

Invariant: under `wait` no group is handed over later than the staleness bound allows, and none is dropped for
being slow; groups leave oldest first, so that short answers gain nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainer_hook.record import UNKNOWN_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyGroup:
    """A committed group."""

    group: int
    oldest_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningGroup:
    """A group that an engine works on."""

    group: int
    version: int
    """Under which its first sample was dispatched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a run's configuration says of batches."""

    policy: str
    staleness: int
    groups_per_step: int
    groups_per_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Hand these groups over."""

    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWait:
    """No batch yet; `reason` is for people."""

    reason: str


def staleness(version: int, oldest_version: int) -> int | None:
    """Version that trains a batch minus the oldest version among its tokens; None when that is unknown."""
    return None if oldest_version == UNKNOWN_VERSION else version - oldest_version


def is_stale(rules: Rules, version: int, oldest_version: int) -> bool:
    """Whether a group passed the bound; an unknown version always has."""
    age = staleness(version, oldest_version)
    return age is None or age > rules.staleness


def may_train(rules: Rules, version: int, oldest_version: int) -> bool:
    """Whether a version may train a group, or has a policy that trains all."""
    return rules.policy in ("keep", "mask") or not is_stale(rules, version, oldest_version)


def overdue(rules: Rules, version: int, ready: Iterable[ReadyGroup]) -> tuple[int, ...]:
    """Committed groups that passed the bound and may not be trained any more; none where they are kept."""
    if rules.policy in ("keep", "mask"):
        return ()
    return tuple(r.group for r in ready if is_stale(rules, version, r.oldest_version))


def hopeless(rules: Rules, training_version: int, running: Iterable[RunningGroup]) -> tuple[int, ...]:
    """Running groups that no step can train within the bound any more, where the policy gives such ones up.

    Args:
        training_version: the version that will train the next step.

    Over-sampling makes them: with more groups than a version trains, those that are not ready when its last
    step closes may be past the bound from then on, and engines need not finish them.
    """
    if rules.policy not in ("drop", "retry"):
        return ()
    return tuple(r.group for r in running if is_stale(rules, training_version, r.version))


def compose(
    rules: Rules,
    *,
    version: int,
    handed_since_publication: int,
    ready: Sequence[ReadyGroup],
    running: Sequence[RunningGroup],
    more_to_come: bool,
) -> Close | BatchWait:
    """Close the next batch, or say what it waits for.

    Args:
        version: the published version; the batch is trained against it.
        ready: committed groups, none of them overdue.
        more_to_come: False when nothing is running or can be started any more: then a smaller batch closes.
    """
    if len(ready) < rules.groups_per_step and (more_to_come or not ready):
        found = f"{len(ready)} of {rules.groups_per_step} groups are ready"
        return BatchWait(reason=f"{found}, {len(running)} are in progress")
    oldest_first = sorted(ready, key=lambda r: (r.oldest_version, r.group))
    chosen, left = oldest_first[: rules.groups_per_step], oldest_first[rules.groups_per_step :]
    if rules.policy == "wait":
        late = _late(rules, version, handed_since_publication + len(chosen), left, running)
        if late:
            return BatchWait(
                reason=f"{len(late)} running groups must not be overtaken, the oldest is {min(late)}"
            )
    return Close(groups=tuple(r.group for r in chosen))


def _late(
    rules: Rules, version: int, handed: int, left: Sequence[ReadyGroup], running: Sequence[RunningGroup]
) -> list[int]:
    """Running groups that could not all be trained within the bound if the batch closed without them.

    Each group has a last version that may train it: its own plus η. Taken earliest first, G groups a version,
    the groups due by a version must fit what is left of the present one and all up to that one.
    """
    eta, per_version = rules.staleness, rules.groups_per_version
    due = Counter(max(0, r.version + eta - version) for r in running)
    due_left = Counter(max(0, r.oldest_version + eta - version) for r in left)
    num_due, num_slots = 0, max(0, per_version - handed)
    for ahead in range(max(1, eta)):
        num_due += due[ahead] + due_left[ahead]
        if num_due > num_slots:
            late = [r.group for r in running if r.version + eta - version <= ahead]
            if late:
                return late
        num_slots += per_version
    return []
