"""A data source with a buffer, whose saved state is its counters alone, as slime's is."""

import json
from pathlib import Path
from typing import Any

from slime.utils.types import Sample


class DataSource:
    def __init__(self, args: Any) -> None:
        self.args = args
        self.buffer: list[list[Sample]] = []
        self.evaluation: list[list[Sample]] = []
        self.epoch_id = self.sample_group_index = self.sample_index = self.sample_offset = 0

    def __len__(self) -> int:
        return int(self.args.num_prompts)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return [self._next() for _ in range(num_samples)]

    def _next(self) -> list[Sample]:
        if self.buffer:
            return self.buffer.pop(0)
        number = self.sample_group_index
        group = [
            Sample(
                group_index=number,
                index=self.sample_index + i,
                prompt=prompt(number),
                label=number,
                multimodal_inputs={"images": ["an image"]} if self.args.multimodal_keys else None,
            )
            for i in range(self.args.n_samples_per_prompt)
        ]
        self.sample_group_index += 1
        self.sample_offset = self.sample_group_index % len(self)
        self.sample_index += len(group)
        return group

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self.buffer += groups

    def save(self, rollout_id: int) -> None:
        path = Path(self.args.save, f"rollout/global_dataset_state_dict_{rollout_id}.pt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([self.sample_group_index, self.sample_index, self.sample_offset]))

    def load(self, rollout_id: int) -> None:
        path = Path(self.args.load, f"rollout/global_dataset_state_dict_{rollout_id}.pt")
        self.sample_group_index, self.sample_index, self.sample_offset = json.loads(path.read_text())


def prompt(number: int) -> str:
    return f"{number:04d} is this prompts number"
