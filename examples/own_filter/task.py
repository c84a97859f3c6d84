"""A reward, and a filter that looks at a group's rewards before anybody trains on it."""

from fa_rollout.sample import Sample


def reward(sample: Sample) -> float:
    """Share of the response's characters that are the label."""
    if not sample.response:
        return 0.0
    return sample.response.count(sample.label) / len(sample.response)


def is_in_reach(samples: list[Sample]) -> bool:
    """Keep a group whose best and worst sample differ: there is something to learn from it."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return max(rewards) - min(rewards) > 0.1
