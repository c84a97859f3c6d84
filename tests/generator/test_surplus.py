"""Over-sampling: what a closed step leaves behind past the bound is ended, by the policy's rule."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fa_rollout.hub.flow.admission import AdmissionWindow, Load, credit
from fa_rollout.hub.flow.composition import (
    BatchWait,
    Close,
    ReadyGroup,
    Rules,
    RunningGroup,
    compose,
    hopeless,
)
from tests.hub.rig import Rig, add_up
from tests.kit.scripted import Lengths, ScriptedEngine

Play = Callable[..., ScriptedEngine]

RUNNING = [RunningGroup(group=name, version=version) for name, version in ((1, 2), (2, 3), (3, 4))]


def rules(policy: str, staleness: int) -> Rules:
    return Rules(policy=policy, staleness=staleness, groups_per_step=2, groups_per_version=2)


@pytest.mark.parametrize(
    ("policy", "staleness", "training_version", "expected"),
    [
        ("drop", 1, 4, (1,)),
        ("drop", 1, 5, (1, 2)),
        ("drop", 0, 4, (1, 2)),
        ("drop", 3, 5, ()),
        ("retry", 1, 5, (1, 2)),
        ("wait", 0, 5, ()),
        ("mask", 0, 5, ()),
        ("keep", 0, 5, ()),
    ],
)
def test_what_no_step_can_train_in_time_is_hopeless_where_the_policy_gives_up(
    policy: str, staleness: int, training_version: int, expected: tuple[int, ...]
) -> None:
    assert hopeless(rules(policy, staleness), training_version, RUNNING) == expected


def test_no_surplus_begins_that_would_be_past_the_bound_when_it_is_trained() -> None:
    window = AdmissionWindow(staleness=0, groups_per_version=4, groups_per_step=4, surplus_groups=2)

    def credits(handed: int) -> int:
        load = Load(
            live=0,
            handed_since_publication=handed,
            remaining=99,
            mean_record_bytes=0.0,
            ring_bytes=1 << 30,
            handed_bytes=0,
        )
        return credit(window, load)

    assert [credits(handed) for handed in (0, 3, 4)] == [6, 3, 0]


def test_wait_does_not_leave_running_surplus_behind_at_the_smallest_bound() -> None:
    ready = [ReadyGroup(group=name, oldest_version=4) for name in (0, 1, 2)]
    running = [RunningGroup(group=3, version=4)]

    def close(ready: list[ReadyGroup], running: list[RunningGroup]) -> Close | BatchWait:
        return compose(
            rules("wait", 0),
            version=4,
            handed_since_publication=0,
            ready=ready,
            running=running,
            more_to_come=True,
        )

    assert isinstance(close(ready, running), BatchWait)
    assert close(ready, []) == Close(groups=(0, 1))


@pytest.mark.parametrize("policy", ["drop", "retry"])
def test_the_surplus_of_a_closed_step_is_ended_at_the_engines_before_the_next_version(
    tmp_path: Path, play: Play, policy: str
) -> None:
    # The first answer goes to the generator's check of the engine.
    lengths = Lengths(kind="list", values=[10] * 9 + [4000] * 4 + [10] * 4000)
    engine = play(tokens_per_s=500.0, lengths=lengths)
    rollout = {"num_steps": 2, "staleness": 0, "staleness_policy": policy, "surplus_groups": 2}
    rig = Rig(tmp_path / "run", engine, rollout=rollout, sampling={"max_new_tokens": 5000})
    with rig, rig.attach() as hook:
        with hook.next_batch() as batch:
            assert {sample.group for sample in batch.samples} == {0, 1, 2, 3}
            # Still inside of the step: engines are free of what it left behind.
            rig.until(lambda: engine.state()["num_running"] == 0, timeout_s=5)
        with hook.update_weights():
            pass
        with hook.next_batch() as batch:
            expected = {4, 5, 6, 7} if policy == "retry" else {6, 7, 8, 9}
            assert {sample.group for sample in batch.samples} == expected
        counts = hook.statistics().hub["counts"]
        assert add_up(counts)
        assert counts["dropped"] == (0 if policy == "retry" else 2)
