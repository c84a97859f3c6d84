"""What dynamic filters say."""

from dataclasses import dataclass
from typing import Any


@dataclass
class DynamicFilterOutput:
    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(function: Any, *args: Any) -> DynamicFilterOutput:
    if function is None:
        return DynamicFilterOutput(keep=True)
    output = function(*args)
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(keep=bool(output))


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    is_needed = output.keep_when_insufficient and remaining_batch_size <= target_data_size
    return not output.keep and not is_needed
