"""Rewards, filters and generate functions as a user would write them."""

from fa_rollout.sample import Sample


def response_length(sample: Sample) -> float:
    return float(len(sample.response_ids))
