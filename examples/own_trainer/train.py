"""GRPO on any number of ranks: `python -m fa_rollout.ranks N train.py`, or torchrun."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from trainer_hook import Batch, MicroBatch, TrainerHook

LEARNING_RATE = 3e-3
CLIP = 0.2


def grpo_loss(model: torch.nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
    """Sum over trained tokens of -advantage × clipped probability ratio to the policy that sampled them."""
    rows, places = micro_batch.sample_ids, micro_batch.position_ids
    padded = torch.zeros(len(micro_batch.samples), micro_batch.max_seqlen, dtype=torch.long)
    padded[rows, places] = micro_batch.tokens
    trained = micro_batch.loss_mask.nonzero()[:, 0]
    logits = model(input_ids=padded, use_cache=False).logits[rows[trained], places[trained] - 1]
    logprobs = logits.log_softmax(-1).gather(-1, micro_batch.tokens[trained, None])[:, 0]
    ratio = (logprobs - micro_batch.logprobs[trained]).exp()
    advantages = micro_batch.advantages()[rows[trained]]
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).sum()


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
                    loss = grpo_loss(model, micro_batch) / batch.num_tokens_global
                    (loss * dist.get_world_size()).backward()  # DDP averages over ranks
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
