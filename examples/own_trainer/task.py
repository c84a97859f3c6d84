"""The reward: as many of the wanted digit as possible."""

from fa_rollout.sample import Sample


def reward(sample: Sample) -> float:
    """Share of the response's characters that are the label."""
    if not sample.response:
        return 0.0
    return sample.response.count(sample.label) / len(sample.response)
