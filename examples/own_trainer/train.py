"""GRPO on any number of ranks: `python -m fa_rollout.ranks N train.py`, or torchrun."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from trainer_hook import Batch, TrainerHook
from trainer_hook.losses import policy_loss, token_logprobs

LEARNING_RATE = 3e-3


def masked_share(batch: Batch) -> float:
    """Share of this rank's response tokens that are not trained, such as the output of tools."""
    num_tokens = sum(sample.response_length for sample in batch.samples)
    return 1 - sum(int(sample.loss_mask.sum()) for sample in batch.samples) / num_tokens


def main() -> None:
    dist.init_process_group("gloo", init_method=os.environ.get("INIT_METHOD"))
    torch.set_num_threads(1)
    model = DistributedDataParallel(AutoModelForCausalLM.from_pretrained("work/model", dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    with TrainerHook.attach() as hook:
        for step in range(hook.step, hook.run.num_steps):
            with hook.next_batch() as batch:
                for micro_batch in batch.micro_batches():
                    logits = model(input_ids=micro_batch.padded_tokens, use_cache=False).logits
                    loss = policy_loss(token_logprobs(logits, micro_batch), micro_batch).sum()
                    (loss * batch.loss_scale).backward()
                optimizer.step()
                optimizer.zero_grad()
                figures = f"reward={batch.reward_mean:.3f} staleness={batch.staleness}"
                masked = masked_share(batch)
            with hook.update_weights() as update:
                update.push(model)
            if dist.get_rank() == 0:
                print(f"step={step} {figures} masked={masked:.2f}", flush=True)
        if dist.get_rank() == 0:
            counts = hook.statistics().hub["counts"]
            print(" ".join(f"{name}={count}" for name, count in counts.items()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
