"""Composition: which groups make the next batch."""

import pytest

from fa_rollout.hub.flow.composition import (
    BatchWait,
    Close,
    ReadyGroup,
    Rules,
    RunningGroup,
    compose,
    overdue,
)
from trainer_hook.record import UNKNOWN_VERSION


def rules(policy: str = "wait", staleness: int = 1, step: int = 2, interval: int = 1) -> Rules:
    return Rules(policy=policy, staleness=staleness, groups_per_step=step, groups_per_version=step * interval)


def ready(*versions: int) -> list[ReadyGroup]:
    return [ReadyGroup(group=index, oldest_version=version) for index, version in enumerate(versions)]


def decide(
    rule: Rules, version: int, groups: list[ReadyGroup], running: list[RunningGroup], **more: object
) -> Close | BatchWait:
    arguments = {"handed_since_publication": 0, "more_to_come": True} | more
    return compose(rule, version=version, ready=groups, running=running, **arguments)  # type: ignore[arg-type]


def test_the_oldest_groups_leave_first() -> None:
    assert decide(rules(), 3, ready(3, 2, 3), []) == Close(groups=(1, 0))


def test_wait_does_not_close_while_a_running_group_would_pass_the_bound() -> None:
    late = [RunningGroup(group=9, version=2)]
    assert isinstance(decide(rules(staleness=1), 3, ready(3, 3), late), BatchWait)
    assert decide(rules(staleness=2), 3, ready(3, 3), late) == Close(groups=(0, 1))


def test_wait_closes_steps_before_the_last_of_a_version() -> None:
    late = [RunningGroup(group=9, version=2)]
    two_steps = rules(staleness=1, interval=2)
    assert isinstance(decide(two_steps, 3, ready(3, 3), late), Close)
    assert isinstance(decide(two_steps, 3, ready(3, 3), late, handed_since_publication=2), BatchWait)


def test_wait_keeps_room_for_slow_groups_that_fall_due_together() -> None:
    late = [RunningGroup(group=9 + i, version=2) for i in range(3)]
    # Due at version 4 at the latest, and 4 trains two groups: one of the three must be trained by 3.
    assert isinstance(decide(rules(staleness=2), 3, ready(3, 3), late), BatchWait)
    assert isinstance(decide(rules(staleness=2), 3, ready(3, 3), late[1:]), Close)
    assert isinstance(decide(rules(staleness=3), 3, ready(3, 3), late), Close)


@pytest.mark.parametrize("policy", ["drop", "retry", "mask", "keep"])
def test_other_policies_do_not_wait_for_slow_groups(policy: str) -> None:
    late = [RunningGroup(group=9, version=0)]
    assert isinstance(decide(rules(policy), 3, ready(3, 3), late), Close)


def test_a_smaller_batch_closes_only_at_the_end_of_the_data() -> None:
    assert isinstance(decide(rules(step=4), 0, ready(0, 0), []), BatchWait)
    assert decide(rules(step=4), 0, ready(0, 0), [], more_to_come=False) == Close(groups=(0, 1))
    assert isinstance(decide(rules(step=4), 0, [], [], more_to_come=False), BatchWait)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("wait", (0, 2)), ("drop", (0, 2)), ("retry", (0, 2)), ("mask", ()), ("keep", ())],
)
def test_stale_and_unknown_versions_are_overdue_where_a_bound_holds(
    policy: str, expected: tuple[int, ...]
) -> None:
    assert overdue(rules(policy, staleness=1), 5, ready(3, 4, UNKNOWN_VERSION)) == expected
