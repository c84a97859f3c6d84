"""The run behind a DataLoader."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch.utils.data import DataLoader

from tests.hub.rig import Rig, add_up
from tests.hub.test_ranks import side_by_side
from trainer_hook import HookStateError, PeerLost
from trainer_hook.dataset import RolloutDataset

MakeRig = Callable[..., Rig]


def test_a_loader_gives_every_step_once_and_ends_with_the_data(rig: MakeRig) -> None:
    seen: list[tuple[int, int]] = []
    kept: list[torch.Tensor] = []
    with rig() as run:
        with run.attach() as hook:
            for batch in DataLoader(RolloutDataset(hook), batch_size=None):
                seen += [(sample.group, sample.member) for sample in batch.samples]
                kept += [micro_batch.tokens for micro_batch in batch.micro_batches()]
                with hook.update_weights():
                    pass
                assert hook.state_dict()["step"] == batch.step + 1
        assert add_up(run.stop().counts)
    assert sorted(seen) == [(group, member) for group in range(24) for member in range(2)]
    assert all(len(tokens) for tokens in kept)


def test_a_step_of_a_loader_is_trained_when_its_rank_goes_on(rig: MakeRig) -> None:
    """Rank 1 dies while it trains what the loader gave it: the state of rank 0 must not count the step."""
    has_begun, may_die = threading.Event(), threading.Event()

    def quick(run: Rig) -> None:
        with run.attach(0, 2) as hook:
            next(iter(DataLoader(RolloutDataset(hook), batch_size=None)))
            assert has_begun.wait(30)
            threading.Timer(0.3, may_die.set).start()
            with pytest.raises(PeerLost):
                hook.state_dict()

    def lost(run: Rig) -> None:
        hook = run.attach(1, 2)
        next(iter(DataLoader(RolloutDataset(hook), batch_size=None)))
        has_begun.set()
        assert may_die.wait(30)
        hook._leave(in_order=False)

    with rig() as run:
        assert side_by_side(lambda: quick(run), lambda: lost(run)) == []


def test_loader_workers_are_refused_with_the_way_out(rig: MakeRig) -> None:
    with rig() as run, run.attach() as hook:
        loader = DataLoader(RolloutDataset(hook), batch_size=None, num_workers=1)
        with pytest.raises(HookStateError, match="num_workers=0"):
            next(iter(loader))
