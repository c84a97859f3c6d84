"""What a checkpoint counts as trained: steps that every rank has left."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.hub.rig import Rig, add_up
from tests.hub.test_ranks import side_by_side
from trainer_hook import TrainerHook
from trainer_hook.errors import HookStateError, PeerLost, Stalled

MakeRig = Callable[..., Rig]
Keys = list[tuple[int, int]]
"""(group, member)"""


class Died(RuntimeError):
    """Ends a rank in the middle of a step."""


def step(hook: TrainerHook, seen: Keys, until: threading.Event | None = None) -> None:
    with hook.next_batch() as batch:
        seen += [(sample.group, sample.member) for sample in batch.samples]
        if until is not None:
            assert until.wait(30)


def test_a_checkpoint_waits_for_ranks_that_have_not_left_its_steps(rig: MakeRig) -> None:
    """Rank 0 has left two steps while rank 1 is in the first; the two peers of each rank count alike."""
    states: list[dict[str, Any]] = []
    seen: Keys = []
    later: Keys = []
    may_leave = threading.Event()

    def quick(run: Rig, peer: int) -> None:
        with run.attach(0, 2, peer=peer, num_peers=2) as hook:
            for _ in range(2):
                step(hook, seen if peer == 0 else [])
            if peer == 0:
                threading.Timer(0.5, may_leave.set).start()
                states.append(hook.state_dict())
                assert may_leave.is_set(), "the state came before rank 1 had left its steps"

    def slow(run: Rig, peer: int) -> None:
        with run.attach(1, 2, peer=peer, num_peers=2) as hook:
            step(hook, seen if peer == 0 else [], may_leave if peer == 1 else None)
            step(hook, seen if peer == 0 else [])

    with rig() as run:
        jobs = [(job, peer) for job in (quick, slow) for peer in range(2)]
        assert side_by_side(*(lambda job=job, peer=peer: job(run, peer) for job, peer in jobs)) == []
    (state,) = states
    assert (state["step"], state["ends"]["trained"]) == (2, 8)
    assert not {group for group, _ in seen} & set(state["unfinished"])
    with rig() as run:
        with run.attach() as hook:
            hook.load_state_dict(state)
            with hook.update_weights():
                pass
            for _ in range(4):
                step(hook, later)
                with hook.update_weights():
                    pass
        assert add_up(run.stop().counts)
    assert sorted(seen + later) == [(group, member) for group in range(24) for member in range(2)]


@pytest.mark.parametrize(("dies", "error"), [(True, PeerLost), (False, HookStateError)])
def test_a_step_that_another_rank_did_not_train_gets_into_no_checkpoint(
    rig: MakeRig, dies: bool, error: type[Exception]
) -> None:
    """Rank 1 dies in the step, or gives it back and goes on."""
    has_left, is_over = threading.Event(), threading.Event()
    states: list[dict[str, Any]] = []

    def quick(run: Rig) -> None:
        with run.attach(0, 2) as hook:
            states.append(hook.state_dict())
            step(hook, [])
            has_left.set()
            with pytest.raises(error):
                hook.state_dict()
            is_over.set()

    def slow(run: Rig) -> None:
        hook = run.attach(1, 2)
        with suppress(Died), hook.next_batch():
            assert has_left.wait(30)
            if dies:
                hook._leave(in_order=False)
            raise Died
        if dies:
            return
        states.append(hook.state_dict())
        assert is_over.wait(30)
        hook.close()

    with rig() as run:
        assert side_by_side(lambda: quick(run), lambda: slow(run)) == []
    assert [(state["step"], state["ends"]["trained"]) for state in states] == [(0, 0)] * len(states)


def test_a_checkpoint_that_waits_for_a_rank_in_its_step_names_it_at_the_limit(rig: MakeRig) -> None:
    may_leave = threading.Event()

    def quick(run: Rig) -> None:
        with run.attach(0, 2) as hook:
            step(hook, [])
            with pytest.raises(Stalled, match=r"rank 1 .* to end step 0"):
                hook.state_dict()
            may_leave.set()
            assert hook.state_dict()["step"] == 1

    def slow(run: Rig) -> None:
        with run.attach(1, 2) as hook:
            step(hook, [], may_leave)

    with rig(trainer={"stall_s": 2}) as run:
        run.until(lambda: len(run.events("committed")) >= 4)
        assert side_by_side(lambda: quick(run), lambda: slow(run)) == []
