"""Engines that hold weights of another run: none of their tokens is ever taken for this run's version 0."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.client.client_kit import post, sent
from tests.hub.rig import Rig
from tests.kit.scripted import ScriptedEngine
from trainer_hook import TrainerHook
from trainer_hook.errors import HookError, Stalled

MakeRig = Callable[..., Rig]
LOADS = "/update_weights_from_disk"
FOREIGN = ["0badc0de:5", "0badc0de:0", "7", "step-40", "in-pieces"]


def given_away(make: MakeRig, engine: ScriptedEngine, label: str, **sections: dict[str, Any]) -> Rig:
    """A run whose engine has been used by another one."""
    rig = make(rollout={"num_steps": 1}, **sections)
    post(engine, "/update_weight_version", {"new_version": label, "abort_all_requests": False})
    engine.clear()
    return rig


def versions(batch: Any) -> set[int]:
    return {span.version for sample in batch.samples for span in sample.version_spans}


@pytest.mark.parametrize("label", FOREIGN)
def test_without_a_way_to_their_first_weights_the_run_names_engines_and_what_to_do(
    rig: MakeRig, engine: ScriptedEngine, label: str
) -> None:
    with given_away(rig, engine, label) as run, run.attach() as hook:
        with pytest.raises(Stalled, match=f"hold weights of another run .*{label}.* call hook.upd"):
            hook.next_batch().__enter__()
        assert not sent(engine)
        assert engine.state()["weight_version"] == label


def test_a_push_before_the_first_batch_is_all_that_they_lack(rig: MakeRig, engine: ScriptedEngine) -> None:
    with given_away(rig, engine, "0badc0de:5", trainer={"publish": "tensor"}) as run, run.attach() as hook:
        with hook.update_weights() as update:
            update.push({"weight": torch.zeros(4)})
        with hook.next_batch() as batch:
            assert versions(batch) == {0}


@pytest.mark.parametrize("named", [True, False])
def test_they_load_the_folder_that_they_started_with_before_the_first_group(
    rig: MakeRig, engine: ScriptedEngine, named: bool
) -> None:
    run = given_away(rig, engine, "0badc0de:5")
    folder = str(run.folder / "model")
    if named:
        run.config["engine"]["model"] = folder
    else:
        engine.configure(tokenizer_path=folder)
    with run, run.attach() as hook, hook.next_batch() as batch:
        assert versions(batch) == {0}
        (load,) = sent(engine, LOADS)
        assert load.body["model_path"] == folder
        assert load.time_s < min(request.time_s for request in sent(engine))
    engine.configure(tokenizer_path=None)


def test_another_run_that_pushes_in_the_middle_ends_this_one_by_name(
    rig: MakeRig, engine: ScriptedEngine
) -> None:
    with rig(rollout={"num_steps": 50}) as run, run.attach() as hook:
        with hook.next_batch():
            post(engine, "/update_weight_version", {"new_version": "0badc0de:1", "abort_all_requests": False})
        with pytest.raises(HookError, match="another run is pushing weights to"):
            train(hook)


def train(hook: TrainerHook) -> None:
    while True:
        with hook.next_batch():
            pass
