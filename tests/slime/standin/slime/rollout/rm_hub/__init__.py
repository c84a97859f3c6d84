"""Reward models by path."""

from typing import Any

from slime.utils.misc import load_function


async def async_rm(args: Any, sample: Any) -> Any:
    if args.custom_rm_path is None:
        return float(len(sample.response))  # by --rm-type: from the text
    return await load_function(args.custom_rm_path)(args, sample)


async def batched_async_rm(args: Any, samples: list[Any]) -> list[Any]:
    result: list[Any] = await load_function(args.custom_rm_path)(args, samples)
    return result
