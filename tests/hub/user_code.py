"""Rewards of the hub's tests."""

from fa_rollout.sample import Sample


def length_reward(sample: Sample) -> float:
    return float(len(sample.response_ids))


def broken_reward(sample: Sample) -> float:
    raise RuntimeError(f"no reward for {sample.group}")
