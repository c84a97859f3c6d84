"""Checkpoints: how they are saved, who loads them, and what comes after."""

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.hub.rig import NUM_PROMPTS, WITH_SPARE, Rig, add_up
from tests.hub.test_ranks import side_by_side
from trainer_hook import TrainerHook
from trainer_hook.errors import HookStateError

MakeRig = Callable[..., Rig]
Seen = list[tuple[int, int, int]]
"""(group, epoch, row) of each sample of member 0."""


def train(hook: TrainerHook, num_steps: int, seen: Seen) -> None:
    for _ in range(num_steps):
        with hook.next_batch() as batch:
            seen += [(s.group, s.epoch, s.prompt_index) for s in batch.samples if s.member == 0]
        with hook.update_weights():
            pass


def resume(hook: TrainerHook, state: dict[str, Any]) -> None:
    hook.load_state_dict(state)
    with hook.update_weights():
        pass


def through_torch(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    torch.save(state, folder / "state.pt")
    loaded: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True)
    return loaded


def through_dcp(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """As a trainer does it: the state of a fresh hook is what the saved one is loaded into."""
    dcp.save({"rollout": state}, checkpoint_id=folder / "dcp", no_dist=True)
    target = {"rollout": {**state, "step": 0, "version": 0, "cursor": 0, "unfinished": [], "lineage": ""}}
    dcp.load(target, checkpoint_id=folder / "dcp", no_dist=True)
    return target["rollout"]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("store", [through_torch, through_dcp])
def test_a_state_survives_the_usual_ways_to_save_it(
    rig: MakeRig, store: Callable[[dict[str, Any], Path], dict[str, Any]], tmp_path: Path
) -> None:
    with rig() as run, run.attach() as hook:
        train(hook, 2, [])
        state = hook.state_dict()
        assert store(state, tmp_path) == state


def test_every_prompt_is_trained_once_an_epoch_through_kills_and_epoch_edges(rig: MakeRig) -> None:
    """Killed twice with a backlog, work in flight, and groups that wait for another attempt."""
    seen: Seen = []
    state: dict[str, Any] | None = None
    num_steps = 9
    for _ in range(2):
        with rig(rollout={"num_steps": num_steps}, run=WITH_SPARE) as run:
            hook = run.attach()
            if state is not None:
                resume(hook, state)
            train(hook, 2, seen)
            run.generator().send_signal(signal.SIGKILL)  # its groups wait for another attempt
            train(hook, 1, seen)
            state = hook.state_dict()
            with hook.next_batch() as batch:  # trained, and lost: no checkpoint covers it
                assert batch.samples
            run.process.send_signal(signal.SIGKILL)
            run.process.wait()
            hook.close()
    assert state is not None
    with rig(rollout={"num_steps": num_steps}) as run, run.attach() as hook:
        resume(hook, state)
        train(hook, num_steps - hook.step, seen)
        assert add_up(run.stop().counts)
    assert sorted(group for group, _, _ in seen) == list(range(4 * num_steps))
    rows = Counter((epoch, row) for _, epoch, row in seen)
    full_epochs = 4 * num_steps // NUM_PROMPTS
    assert full_epochs >= 3
    assert all(rows[epoch, row] == 1 for epoch in range(full_epochs) for row in range(NUM_PROMPTS))
    assert max(rows.values()) == 1


def test_a_checkpoint_of_one_rank_goes_on_with_two(rig: MakeRig) -> None:
    seen: Seen = []
    with rig() as run, run.attach() as hook:
        train(hook, 3, seen)
        state = hook.state_dict()
    with rig() as run:
        parts: list[Seen] = [[], []]

        def job(rank: int) -> None:
            with run.attach(rank, 2) as hook:
                resume(hook, state)
                assert hook.step == 3
                train(hook, 3, parts[rank])

        threads = [threading.Thread(target=job, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert add_up(run.stop().counts)
    assert all(parts), "both ranks had a part"
    assert sorted(group for group, _, _ in seen + parts[0] + parts[1]) == list(range(24))


def test_a_checkpoint_of_other_data_is_refused_with_both_named(rig: MakeRig) -> None:
    with rig() as run, run.attach() as hook:
        state = hook.state_dict()
    with rig(data={"seed": 6}) as run, run.attach() as hook:  # noqa: SIM117
        with pytest.raises(HookStateError, match=r"seed 5, found .*seed 6"):
            hook.load_state_dict(state)


def test_an_update_that_is_missing_after_a_load_is_told_at_the_first_batch_even_with_groups_in_the_ring(
    rig: MakeRig,
) -> None:
    with rig() as run:
        with run.attach() as hook:
            train(hook, 2, [])
            state = hook.state_dict()
        with run.attach() as hook:
            hook.load_state_dict(state)
            with (
                pytest.raises(HookStateError, match=r"call hook.update_weights\(\) once after"),
                hook.next_batch(),
            ):
                pass
            with hook.update_weights():
                pass
            train(hook, 1, [])
        assert add_up(run.stop().counts)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_load_that_the_leader_does_not_make_is_refused_at_once(rig: MakeRig, is_first: bool) -> None:
    """Rank 1 asks before the leader begins to train, or after."""
    has_asked, has_batch = threading.Event(), threading.Event()
    with rig() as run:
        leader, other = run.attach(0, 2), run.attach(1, 2)
        state = other.state_dict()

        def load() -> None:
            if not is_first:
                assert has_asked.wait(30)
            with pytest.raises(HookStateError, match="load it on every rank or on none"):
                other.load_state_dict(state)
            with other.next_batch():
                has_batch.set()

        def train() -> None:
            if is_first:
                time.sleep(0.3)
            leader.is_batch_ready()
            has_asked.set()
            with leader.next_batch():
                assert has_batch.wait(30)

        assert side_by_side(load, train) == []
