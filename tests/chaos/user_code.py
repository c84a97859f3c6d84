"""The reward of a chaos job: a pure function of the tokens, so that a checker can tell whose it is."""

import time
from collections.abc import Sequence

from fa_rollout.sample import Sample

MODULUS = 8191


def reward_of(token_ids: Sequence[int]) -> float:
    return float(sum((place + 1) * token for place, token in enumerate(token_ids)) % MODULUS)


def reward(sample: Sample) -> float:
    time.sleep(0.002)
    return reward_of([int(token) for token in sample.response_ids])
