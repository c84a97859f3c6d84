"""Policy gradient with group-relative advantages, in one process."""

import torch
from transformers import AutoModelForCausalLM

from trainer_hook import TrainerHook
from trainer_hook.batch import MicroBatch

LEARNING_RATE = 3e-3


def policy_loss(model: torch.nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
    """Sum over trained tokens of -advantage × probability ratio to the policy that sampled them."""
    rows, places = micro_batch.sample_ids, micro_batch.position_ids
    padded = torch.zeros(len(micro_batch.samples), micro_batch.max_seqlen, dtype=torch.long)
    padded[rows, places] = micro_batch.tokens
    trained = micro_batch.loss_mask.nonzero()[:, 0]
    logits = model(input_ids=padded, use_cache=False).logits[rows[trained], places[trained] - 1]
    logprobs = logits.log_softmax(-1).gather(-1, micro_batch.tokens[trained, None])[:, 0]
    ratio = (logprobs - micro_batch.logprobs[trained]).exp()
    return -(ratio * micro_batch.advantages()[rows[trained]]).sum()


def main() -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained("work/model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    with TrainerHook.attach() as hook:
        for step in range(hook.step, hook.run.num_steps):
            with hook.next_batch() as batch:
                for micro_batch in batch.micro_batches():
                    (policy_loss(model, micro_batch) / batch.num_tokens_global).backward()
                optimizer.step()
                optimizer.zero_grad()
                print(f"step={step} reward={batch.reward_mean:.3f} staleness={batch.staleness}", flush=True)
            with hook.update_weights() as update:
                update.push(model)


if __name__ == "__main__":
    main()
