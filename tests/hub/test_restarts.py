"""Trainers that come after one that was lost: from the run's beginning, or only with a checkpoint."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fa_rollout.engines.tiny_model import write_tiny_model
from tests.hub.rig import CHARACTERS, VOCAB_SIZE, Rig, add_up
from tests.kit.scripted import Lengths, Script, ScriptedEngine
from trainer_hook import TrainerHook
from trainer_hook.errors import HookStateError, Stalled

MakeRig = Callable[..., Rig]
ALL = [(group, member) for group in range(24) for member in range(2)]
DOOMED = """
import sys
from trainer_hook import TrainerHook
hook = TrainerHook.attach(dp_rank=0, dp_size=1)
for _ in range(2):
    with hook.next_batch():
        pass
    with hook.update_weights():
        pass
if "saves" in sys.argv:
    hook.state_dict()
print("trained", flush=True)
import time; time.sleep(60)
"""


def lose_a_trainer(run: Rig, *arguments: str) -> None:
    """A trainer of two steps, killed."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", DOOMED, *arguments], env=run.environment, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "trained\n"
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()


def train(hook: TrainerHook, num_steps: int) -> list[tuple[int, int]]:
    seen = []
    for _ in range(num_steps):
        with hook.next_batch() as batch:
            seen += [(sample.group, sample.member) for sample in batch.samples]
        with hook.update_weights():
            pass
    return seen


def test_a_trainer_lost_before_its_first_checkpoint_begins_again_with_the_first_weights(
    rig: MakeRig, tmp_path: Path
) -> None:
    """As under torchrun: the same program again, which finds no checkpoint and loads none."""
    model = write_tiny_model(tmp_path / "first", characters=CHARACTERS)
    script = Script(
        vocab_size=VOCAB_SIZE,
        lengths=Lengths(kind="uniform", low=4, high=40),
        tokens_per_s=400.0,
        model_path=str(model),
    )
    with ScriptedEngine.start(script) as engine, Rig(tmp_path / "run", engine) as run:
        lose_a_trainer(run)
        run.until(lambda: run.events("left"))
        with run.attach() as hook:
            assert (hook.step, hook.version) == (0, 0)
            assert sorted(train(hook, 6)) == ALL
        assert add_up(run.stop().counts)
        loads = [r.body["model_path"] for r in engine.requests("/update_weights_from_disk")]
        assert loads[0] == str(model), "the engines get back what they started with"
        assert run.events("loaded")[0]["step"] == 0
        assert any("begins again" in text for text in run.notices)


def test_engines_that_tell_no_folder_get_the_first_weights_from_the_trainer(rig: MakeRig) -> None:
    # At staleness 0 no group of the first weights is left over, of which a batch could be made.
    with rig(rollout={"staleness": 0}) as run:
        lose_a_trainer(run)
        run.until(lambda: run.events("left"))
        with run.attach() as hook:
            with pytest.raises(Stalled, match="update_weights"), hook.next_batch():
                pass
            with hook.update_weights() as update:
                assert update.version == 0
            assert sorted(train(hook, 6)) == ALL
        assert add_up(run.stop().counts)


def test_where_a_checkpoint_was_taken_the_next_trainer_must_load_one_or_say_that_it_has_none(
    rig: MakeRig,
) -> None:
    with rig() as run:
        lose_a_trainer(run, "saves")
        run.until(lambda: run.events("left"))
        with run.attach() as hook:
            with pytest.raises(HookStateError, match=r"trained 2 steps.*load_state_dict\(None\)"):
                hook.next_batch().__enter__()
            hook.load_state_dict(None)
            assert hook.step == 0
            with hook.update_weights():
                pass
            assert sorted(train(hook, 6)) == ALL
        assert add_up(run.stop().counts)


def test_to_say_that_there_is_no_checkpoint_changes_nothing_in_a_run_that_is_new(rig: MakeRig) -> None:
    with rig() as run, run.attach() as hook:
        lineage = hook.lineage
        hook.load_state_dict(None)
        assert hook.lineage == lineage
        assert sorted(train(hook, 6)) == ALL
