"""TRL's `GRPOTrainer`, fed by the hook through its `rollout_func`.

A rollout function answers for the prompts that TRL drew. Here the hub draws prompts, so that TRL's data set
is a row of blanks, and each call gives the next step's groups: prompt, completion, mask and reward at once.
"""

from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trainer_hook import TrainerHook
from trainer_hook.dataset import RolloutDataset


def main() -> None:
    torch.set_num_threads(1)
    with TrainerHook.attach(dp_rank=0, dp_size=1) as hook:
        num_samples = hook.run.groups_per_step * hook.run.samples_per_group
        batches = iter(RolloutDataset(hook))

        def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
            samples = sorted(next(batches).samples, key=lambda sample: (sample.group, sample.member))
            assert len(samples) == len(prompts)
            return {
                "prompt_ids": [sample.tokens[: sample.prompt_length].tolist() for sample in samples],
                "completion_ids": [sample.response_tokens.tolist() for sample in samples],
                "logprobs": [sample.logprobs.tolist() for sample in samples],
                "env_mask": [sample.loss_mask.tolist() for sample in samples],
                "score": [sample.reward for sample in samples],
            }

        class WeightsToEngines(TrainerCallback):
            def on_step_end(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
                with hook.update_weights() as update:
                    update.push(model)

        arguments = GRPOConfig(
            output_dir="work/trl_grpo",
            max_steps=hook.run.num_steps,
            num_generations=hook.run.samples_per_group,
            per_device_train_batch_size=num_samples,
            steps_per_generation=1,
            gradient_checkpointing=False,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        GRPOTrainer(
            model="work/model",
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": [""] * hook.run.groups_per_step}),
            reward_funcs=lambda score, **_: score,
            rollout_func=rollout,
            callbacks=[WeightsToEngines()],
        ).train()


if __name__ == "__main__":
    main()
