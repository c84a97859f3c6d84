"""A GRPO trainer in one page: `python -m fa_rollout.ranks 2 -m fa_rollout.demo.train --model FOLDER`.

In: batches of the run that FA_ROLLOUT_ADDRESS names. Out: new weights after each step. It waits for data
only in `next_batch`, and knows nothing of engines, prompts or rewards. Copy it and change what you like.

Shapes: n samples of a micro-batch, L tokens of the longest, R tokens in the loss, V vocabulary.
"""

import argparse
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from fa_rollout.demo.report import Reporter
from trainer_hook import TrainerHook
from trainer_hook.batches.batch import Batch, MicroBatch
from trainer_hook.errors import EndOfData
from trainer_hook.losses import policy_loss, token_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What one may want to change."""

    learning_rate: float
    entropy_weight: float
    """Keeps a model that starts from nothing from settling on the first answer that pays."""
    warmup_steps: int = 10
    clip_low: float = 0.2
    clip_high: float = 0.28
    """Wider upwards: DAPO, arXiv 2503.14476."""
    max_grad_norm: float = 1.0

    def rate(self, step: int, num_steps: int) -> float:
        """Up over the warm-up, then down to a tenth, both linearly."""
        warmup = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * warmup * (1 - 0.9 * step / num_steps)


def grpo_loss(
    model: torch.nn.Module, micro_batch: MicroBatch, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped policy gradient with group-relative advantages; loss and entropy, summed over the tokens."""
    logits_nLV = model(input_ids=micro_batch.padded_tokens, use_cache=False).logits
    logprobs_T = token_logprobs(logits_nLV, micro_batch)
    policy = policy_loss(logprobs_T, micro_batch, low=recipe.clip_low, high=recipe.clip_high).sum()
    trained_R = micro_batch.loss_mask.nonzero()[:, 0]
    rows_R, places_R = micro_batch.sample_ids[trained_R], micro_batch.position_ids[trained_R]
    logprobs_RV = logits_nLV[rows_R, places_R - 1].float().log_softmax(-1)
    entropy = -(logprobs_RV.exp() * logprobs_RV).sum()
    return policy - recipe.entropy_weight * entropy, entropy.detach()


def train_step(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, batch: Batch, recipe: Recipe
) -> float:
    """One optimizer step over this rank's part of a batch; mean entropy over all ranks."""
    entropy = torch.zeros(())
    micro_batches = batch.micro_batches()
    for index, micro_batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with nullcontext() if is_last else model.no_sync():
            loss, entropy_sum = grpo_loss(model, micro_batch, recipe)
            (loss * batch.loss_scale).backward()
        entropy += entropy_sum
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(entropy)
    return float(entropy) / batch.num_tokens_global


def train(hook: TrainerHook, folder: Path, recipe: Recipe, reporter: Reporter) -> None:
    """Until the run's last step or the end of its data."""
    model = DistributedDataParallel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(hook.step, hook.run.num_steps):
        optimizer.param_groups[0]["lr"] = recipe.rate(step, hook.run.num_steps)
        with hook.next_batch() as batch:
            entropy = train_step(model, optimizer, batch, recipe)
            reporter.look(batch)
        with hook.update_weights() as update:
            update.push(model)
        reporter.write(hook, entropy)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="the folder that the engines serve too")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--entropy-weight", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figures", type=Path, help="file to which rank 0 adds a line of figures a step")
    options = parser.parse_args()
    recipe = Recipe(learning_rate=options.learning_rate, entropy_weight=options.entropy_weight)
    # Over a file where fa_rollout.ranks started this, else as torchrun says.
    dist.init_process_group("gloo", init_method=os.environ.get("INIT_METHOD"))
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    figures = options.figures if dist.get_rank() == 0 else None
    try:
        with TrainerHook.attach() as hook, Reporter(figures, options.model) as reporter:
            train(hook, options.model, recipe, reporter)
    except EndOfData as end:
        print(f"the data has ended: {end}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
