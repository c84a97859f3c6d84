"""A trainer that trains, and writes down what it saw: one JSON line a sample, of rank R in `seen-R.jsonl`.

In: the run of its environment. Out: for each sample its identity, tokens, version spans, and the largest
difference between the ring's log-probabilities and those of this trainer's own weights of the same versions.
"""

import copy
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from fa_rollout.demo.train import Recipe, train_step
from trainer_hook import TrainerHook
from trainer_hook.batches.sample import Sample


class Weights:
    """The weights of each version, and what they say of a sample."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._by_version: dict[int, dict[str, torch.Tensor]] = {}

    def keep(self, version: int, model: torch.nn.Module) -> None:
        self._by_version[version] = copy.deepcopy(model.state_dict())

    def largest_difference(self, sample: Sample) -> float:
        start, largest = 0, 0.0
        tokens = sample.tokens.long()
        for span in sample.version_spans:
            self._model.load_state_dict(self._by_version[span.version])
            with torch.no_grad():
                logprobs_TV = self._model(input_ids=tokens[None]).logits[0].log_softmax(-1)
            logprobs_r = logprobs_TV[sample.prompt_length - 1 : -1].gather(
                -1, sample.response_tokens.long()[:, None]
            )
            difference_r = (logprobs_r[:, 0] - sample.logprobs).abs() * sample.loss_mask
            largest = max(largest, float(difference_r[start : span.end].max()))
            start = span.end
        assert start == sample.response_length, "spans cover the response"
        return largest


def note(sample: Sample, step: int, version: int, difference: float) -> dict[str, object]:
    return {
        "step": step,
        "version": version,
        "group": sample.group,
        "member": sample.member,
        "prompt": sample.prompt,
        "label": sample.label,
        "prompt_tokens": sample.tokens[: sample.prompt_length].tolist(),
        "response_tokens": sample.response_tokens.tolist(),
        "loss_mask": sample.loss_mask.tolist(),
        "versions": [span.version for span in sample.version_spans],
        "reward": sample.reward,
        "group_reward_mean": sample.group_reward_mean,
        "difference": difference,
    }


def main(model_folder: Path, output: Path) -> None:
    dist.init_process_group("gloo", init_method=os.environ.get("INIT_METHOD"))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    weights = Weights(model_folder)
    recipe = Recipe(learning_rate=3e-3, entropy_weight=0.05)
    with TrainerHook.attach() as hook, (output / f"seen-{dist.get_rank()}.jsonl").open("w") as seen:
        weights.keep(hook.version, model.module)
        for step in range(hook.run.num_steps):
            with hook.next_batch() as batch:
                for sample in batch.samples:
                    line = note(sample, step, batch.version, weights.largest_difference(sample))
                    seen.write(json.dumps(line) + "\n")
                train_step(model, optimizer, batch, recipe)
            with hook.update_weights() as update:
                update.push(model)
            weights.keep(hook.version, model.module)
            seen.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
