"""transformers' `Trainer`, fed by the hook: its loop, optimizer, schedule and logging, our batches.

One optimizer step is one batch of the run.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from trainer_hook import TrainerHook
from trainer_hook.dataset import RolloutDataset
from trainer_hook.losses import policy_loss, token_logprobs


class RolloutTrainer(Trainer):
    """One rollout batch a step, its micro-batches one after the other."""

    def __init__(self, hook: TrainerHook, **arguments: Any) -> None:
        self.hook = hook
        super().__init__(**arguments, callbacks=[WeightsToEngines(hook)])

    def get_train_dataloader(self) -> DataLoader:
        """Not prepared by Accelerate: each rank's hook gives that rank its own part already."""
        return DataLoader(
            RolloutDataset(self.hook), batch_size=None, collate_fn=lambda batch: {"batch": batch}
        )

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *_: Any) -> torch.Tensor:
        model.train()
        batch = inputs["batch"]
        total = torch.zeros(())
        for micro_batch in batch.micro_batches():
            logits = model(input_ids=micro_batch.padded_tokens, use_cache=False).logits
            loss = policy_loss(token_logprobs(logits, micro_batch), micro_batch).sum() * batch.loss_scale
            self.accelerator.backward(loss)
            total += loss.detach()
        self.log({"reward": batch.reward_mean, "staleness": batch.staleness or 0})
        return total


class WeightsToEngines(TrainerCallback):
    """New weights go to the engines after each optimizer step."""

    def __init__(self, hook: TrainerHook) -> None:
        self.hook = hook

    def on_step_end(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        with self.hook.update_weights() as update:
            update.push(model)


def main() -> None:
    dist.init_process_group("gloo", init_method=os.environ.get("INIT_METHOD"))
    torch.set_num_threads(1)
    with TrainerHook.attach() as hook:
        arguments = TrainingArguments(
            output_dir="work/hf_trainer",
            max_steps=hook.run.num_steps,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_pretrained("work/model", dtype=torch.float32)
        RolloutTrainer(hook, model=model, args=arguments).train()


if __name__ == "__main__":
    main()
