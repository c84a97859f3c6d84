"""slime's train data from samples, in tensors that slime's own next step takes over as they are.

In: flat samples. Out: the dictionary that slime's rollout manager makes itself, with the long columns as
int64, int32 and float32 tensors. Invariant: equal, value by value, to what slime's own conversion and its
tensorizing give.

N samples.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fa_rollout.slime import upstream
from fa_rollout.slime.manager.ray_tensor import RayTensor

_NORMALIZED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_DIVIDED = ("grpo", "gspo", "cispo")
_EPSILON = 1e-6


def convert(args: Any, samples: list[Any]) -> dict[str, Any]:
    """Train data of a rollout, by slime's names.

    Raises:
        ValueError: a loss mask is not as long as its response, or a top-p replay not as long as its tokens.
    """
    raw_rewards, rewards = _rewards(args, samples)
    masks = [_mask(sample) for sample in samples]
    rollout_ids = _rollout_ids(samples)
    truncated = upstream.sample_status().TRUNCATED
    data: dict[str, Any] = {
        "tokens": [_column(sample.tokens, "q", np.int64) for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": _raw_rewards(samples, raw_rewards),
        "truncated": [int(sample.status == truncated) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": rollout_ids,
        "loss_masks": [RayTensor.over(mask) for mask in masks],
        "rollout_mask_sums": _mask_sums(rollout_ids, masks),
    }
    data |= _optional(args, samples)
    return data


def _rewards(args: Any, samples: list[Any]) -> tuple[list[Any], list[Any]]:
    """(as the reward model gave them, as they are trained on): the group's mean taken away, divided by its
    standard deviation (GRPO, arXiv 2402.03300), where the estimator asks for it."""
    own = getattr(args, "custom_reward_post_process_path", None)
    if own is not None:
        raw, processed = upstream.load_function(own)(args, samples)
        return raw, processed
    key = getattr(args, "reward_key", None)
    raw = [sample.reward[key] if key else sample.reward for sample in samples]
    if getattr(args, "advantage_estimator", None) not in _NORMALIZED or not args.rewards_normalization:
        return raw, raw
    flat = torch.tensor(raw, dtype=torch.float)
    is_even = len(raw) == args.n_samples_per_prompt * args.rollout_batch_size
    groups = flat.reshape(-1, args.n_samples_per_prompt) if is_even else flat.reshape(1, -1)
    groups = groups - groups.mean(dim=-1, keepdim=True)
    if args.advantage_estimator in _DIVIDED and args.grpo_std_normalization:
        groups = groups / (groups.std(dim=-1, keepdim=True) + _EPSILON)
    return raw, groups.flatten().tolist()


def _raw_rewards(samples: list[Any], raw: list[Any]) -> list[Any]:
    """Samples may name another raw reward in their metadata; then all do, or give their reward."""
    named = [(sample.metadata or {}).get("raw_reward", sample.reward) for sample in samples]
    has_names = any("raw_reward" in (sample.metadata or {}) for sample in samples)
    return named if has_names else raw


def _rollout_ids(samples: list[Any]) -> list[int]:
    """One id per execution; samples that have none get the smallest that nobody has."""
    ids = [sample.rollout_id for sample in samples]
    taken = {number for number in ids if number is not None}
    free = (number for number in range(len(ids) + len(taken)) if number not in taken)
    return [next(free) if number is None else number for number in ids]


def _mask(sample: Any) -> npt.NDArray[np.int32]:
    length = sample.response_length
    if sample.remove_sample:
        return np.zeros(length, np.int32)
    if sample.loss_mask is None:
        return np.ones(length, np.int32)
    mask = sample.loss_mask
    if len(mask) != length:
        raise ValueError(f"a loss mask must be as long as its response ({length} tokens), found {len(mask)}")
    if isinstance(mask, list):
        is_whole = mask.count(1) == length
        return np.ones(length, np.int32) if is_whole else np.array(mask, np.int32)
    return np.ascontiguousarray(mask, np.int32)


def _mask_sums(rollout_ids: list[int], masks: list[npt.NDArray[np.int32]]) -> list[int]:
    """By sample, the tokens in the loss over all samples of its execution."""
    sums: Counter[int] = Counter()
    for rollout_id, mask in zip(rollout_ids, masks, strict=True):
        sums[rollout_id] += int(mask.sum())
    return [sums[rollout_id] for rollout_id in rollout_ids]


def _column(values: Any, code: str, dtype: Any) -> torch.Tensor:
    """A tensor of its own memory from a list, or of the array's memory."""
    if isinstance(values, torch.Tensor):
        return values
    if isinstance(values, list):
        return RayTensor.over(np.frombuffer(array(code, values), dtype))
    return RayTensor.over(np.asarray(values, dtype))


def _optional(args: Any, samples: list[Any]) -> dict[str, Any]:
    """Columns that only some trainings have, decided as slime decides: mostly by the first sample."""
    first, data = samples[0], {}
    if first.metadata and "round_number" in first.metadata:
        data["round_number"] = [sample.metadata["round_number"] for sample in samples]
    for name, source in (
        ("rollout_log_probs", "rollout_log_probs"),
        ("teacher_log_probs", "teacher_log_probs"),
    ):
        if getattr(first, source) is not None:
            data[name] = [_column(getattr(sample, source), "f", np.float32) for sample in samples]
    if getattr(args, "rollout_top_p", 1.0) != 1.0:
        data |= _top_p(samples)
    if first.rollout_routed_experts is not None:
        experts = [torch.as_tensor(sample.rollout_routed_experts) for sample in samples]
        if getattr(args, "use_rollout_routing_replay", False):
            upstream.check_routed_experts(experts, args)
        data["rollout_routed_experts"] = experts
    if first.train_metadata is not None:
        data["metadata"] = [sample.train_metadata for sample in samples]
    if any(sample.multimodal_train_inputs is not None for sample in samples):
        data["multimodal_train_inputs"] = [sample.multimodal_train_inputs for sample in samples]
    if first.metadata is not None:
        data["source_names"] = [upstream.source_of(sample) for sample in samples]
    return data


def _top_p(samples: Sequence[Any]) -> dict[str, Any]:
    for sample in samples:
        ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
        holds = ids is not None and offsets is not None and len(offsets) == sample.response_length + 1
        if not holds or int(offsets[-1]) != len(ids):
            raise ValueError(
                f"a top-p replay must have {sample.response_length + 1} offsets, the last its number of ids; "
                f"sample {sample.index} has not: sample with engines that return kept top-p ids"
            )
    return {
        "rollout_top_p_token_ids": [sample.rollout_top_p_token_ids for sample in samples],
        "rollout_top_p_token_offsets": [sample.rollout_top_p_token_offsets for sample in samples],
    }
