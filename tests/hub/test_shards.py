"""Whose prompts a run takes where the job has several nodes: told by the configuration, or by its ranks."""

from collections.abc import Callable
from typing import Any

import pytest

from fa_rollout.config import ConfigError, from_dict
from fa_rollout.data.order import epoch_order
from tests.hub.rig import NUM_PROMPTS, Rig, add_up
from trainer_hook import TrainerHook
from trainer_hook.errors import HookStateError

MakeRig = Callable[..., Rig]


def attach(run: Rig, node: int, num_nodes: int) -> TrainerHook:
    return TrainerHook.attach(
        address=run.address,
        run=run.run_id,
        token=run.token,
        dp_rank=0,
        dp_size=1,
        node=node,
        num_nodes=num_nodes,
        timeout_s=20,
    )


def rows_of_node(node: int, num_nodes: int, num_groups: int) -> list[tuple[int, int, int]]:
    """(group, epoch, row) of the first groups of a node."""
    found = []
    for group in range(num_groups):
        epoch, place = divmod(group * num_nodes + node, NUM_PROMPTS)
        found.append((group, epoch, int(epoch_order(NUM_PROMPTS, epoch, seed=5, shuffle=True)[place])))
    return found


def train(hook: TrainerHook, num_steps: int) -> list[tuple[int, int, int]]:
    seen = []
    for _ in range(num_steps):
        with hook.next_batch() as batch:
            seen += [(s.group, s.epoch, s.prompt_index) for s in batch.samples if s.member == 0]
        with hook.update_weights():
            pass
    return seen


def test_the_first_rank_says_which_prompts_are_this_nodes(rig: MakeRig) -> None:
    """By then the run has begun with all prompts: what it did is given up."""
    with rig() as run:
        run.until(lambda: run.events("committed"))
        with attach(run, 1, 3) as hook:
            assert sorted(train(hook, 6)) == rows_of_node(1, 3, 24)
        assert add_up(run.stop().counts)
        assert run.events("shard")[0]["num_shards"] == 3


@pytest.mark.slow
def test_each_node_has_its_own_part_of_a_checkpoint(rig: MakeRig) -> None:
    with rig() as run, attach(run, 1, 2) as hook:
        seen = train(hook, 2)
        state = hook.state_dict(payload=True)
    assert list(state) == ["node1of2"]
    other: dict[str, Any] = {"node0of2": {"step": 7}}
    with rig() as run, attach(run, 1, 2) as hook:
        with pytest.raises(HookStateError, match=r"node 1 of 2, the state is from node 0"):
            hook.load_state_dict(other)
        hook.load_state_dict(other | state)
        with hook.update_weights():
            pass
        assert sorted(seen + train(hook, 4)) == rows_of_node(1, 2, 24)
        assert add_up(run.stop().counts)


@pytest.mark.parametrize(
    ("taken_with", "loaded_with", "text"),
    [
        (2, 1, "saved with 2 nodes, this job has 1"),
        (1, 2, "saved with 1 node, this job has 2"),
        (2, 3, "saved with 2 nodes, this job has 3"),
    ],
)
def test_a_checkpoint_is_refused_by_another_number_of_nodes_in_one_sentence(
    rig: MakeRig, taken_with: int, loaded_with: int, text: str
) -> None:
    with rig() as run, attach(run, 0, taken_with) as hook:
        state = hook.state_dict()
    with rig() as run, attach(run, 0, loaded_with) as hook, pytest.raises(HookStateError, match=text):
        hook.load_state_dict(state)


def test_a_rank_of_another_node_than_the_runs_is_refused_with_both_named(rig: MakeRig) -> None:
    with rig(data={"shard": 0, "num_shards": 2}) as run:
        with pytest.raises(HookStateError, match=r"shard 0 of 2.*node 1 of 2"):
            attach(run, 1, 2)
        with attach(run, 0, 2) as hook:
            assert set(train(hook, 1)) <= set(rows_of_node(0, 2, 24))


def test_a_run_that_has_trained_with_all_prompts_takes_no_node(rig: MakeRig) -> None:
    with rig() as run:
        with attach(run, 0, 1) as hook:
            train(hook, 1)
        with pytest.raises(HookStateError, match=r"shard 0 of 1.*node 1 of 2.*num_nodes=1"):
            attach(run, 1, 2)


def test_engines_are_shared_only_by_ranks_that_can_agree(rig: MakeRig) -> None:
    with rig(data={"shard": 1, "num_shards": 2}, engine={"shared": True}) as run:  # noqa: SIM117
        with pytest.raises(HookStateError, match="pass nodes= to TrainerHook"):
            attach(run, 1, 2)


def test_shared_engines_need_addresses_and_shards(rig: MakeRig) -> None:
    tree = rig(engine={"shared": True}).config
    with pytest.raises(ConfigError, match=r"found 1 urls and 1 shards"):
        from_dict(tree)
