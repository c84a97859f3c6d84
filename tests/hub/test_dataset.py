"""The run behind a DataLoader."""

from collections.abc import Callable

import pytest
import torch
from torch.utils.data import DataLoader

from tests.hub.rig import Rig, add_up
from trainer_hook import HookStateError
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


def test_loader_workers_are_refused_with_the_way_out(rig: MakeRig) -> None:
    with rig() as run, run.attach() as hook:
        loader = DataLoader(RolloutDataset(hook), batch_size=None, num_workers=1)
        with pytest.raises(HookStateError, match="num_workers=0"):
            next(iter(loader))
