"""A trainer of one rank that loses an engine in the middle of a push, by its own hand, and checks all tokens.

In: model, output folder, and the pid of the engine to kill; 0: none is lost, and all weights but the last
ones are frozen. Out: `seen-0.jsonl` as of `checking_trainer`.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.end_to_end.checking_trainer import Weights, note
from trainer_hook import TrainerHook

LOST_AT = 1
"""The step whose push loses the engine."""


class Deadly(torch.Tensor):
    """A weight whose gathering, once, is an engine's death; like a sharded one it is gathered when due."""

    victim: int | None = None

    def full_tensor(self) -> torch.Tensor:
        if Deadly.victim is not None:
            os.kill(Deadly.victim, signal.SIGKILL)
            Deadly.victim = None
        return self.as_subclass(torch.Tensor)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """As the model has them; one in the middle is deadly."""
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    middle = list(state)[len(state) // 2]
    return state | {middle: state[middle].detach().as_subclass(Deadly)}


def main(model_folder: Path, output: Path, victim: int) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    weights = Weights(model_folder)
    with TrainerHook.attach() as hook, (output / "seen-0.jsonl").open("w") as seen:
        weights.keep(hook.version, model)
        for step in range(hook.run.num_steps):
            with hook.next_batch() as batch:
                for sample in batch.samples:
                    line = note(sample, step, batch.version, weights.largest_difference(sample))
                    seen.write(json.dumps(line) + "\n")
            with torch.no_grad():
                for parameter in list(model.parameters())[0 if victim else -2 :]:
                    parameter.add_(0.05 * torch.randn_like(parameter))
            if step == LOST_AT and victim:
                Deadly.victim = victim
            with hook.update_weights() as update:
                update.push(weights_of(model))
            weights.keep(hook.version, model)
            seen.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
