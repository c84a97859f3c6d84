"""Hooks over finished samples, which may ask for the rollout id of the process."""

from typing import Any

from slime.utils.misc import load_function

_current_rollout_id: int | None = None


def set_current_rollout_id(rollout_id: int | None) -> None:
    global _current_rollout_id
    _current_rollout_id = rollout_id


async def apply_rollout_sample_hooks(args: Any, value: Any, **kwargs: Any) -> Any:
    for path in args.rollout_sample_hook_path or []:
        items = value if isinstance(value, list) else [value]
        for item in items:
            load_function(path)(args, item, rollout_id=_current_rollout_id)
    return value
