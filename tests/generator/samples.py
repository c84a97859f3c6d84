"""Samples for tests, whole and scored."""

import numpy as np

from fa_rollout.generator.records.assemble import Identity
from fa_rollout.sample import FinishReason, Sample
from trainer_hook.record import TokenSampling, VersionSpan


def fresh_sample(*, group: int = 5, member: int = 0, prompt_len: int = 3) -> Sample:
    """As a generate function gets it."""
    return Sample(
        group=group,
        member=member,
        attempt=0,
        epoch=0,
        prompt_index=2,
        prompt="a prompt",
        label="a label",
        metadata={"source": "test"},
        prompt_ids=np.arange(10, 10 + prompt_len, dtype=np.int32),
    )


def scored_sample(*, group: int = 5, member: int = 0, num_tokens: int = 4, reward: float = 1.0) -> Sample:
    """As it goes into a record; half of it sampled by version 1, the rest by version 2."""
    sample = fresh_sample(group=group, member=member)
    sample.response_ids = np.arange(100, 100 + num_tokens, dtype=np.int32)
    sample.logprobs = -np.linspace(0.0, 1.0, num_tokens, dtype=np.float32)
    sample.loss_mask = np.ones(num_tokens, np.uint8)
    ends = dict.fromkeys(end for end in (num_tokens // 2, num_tokens) if end)
    sample.version_spans = [VersionSpan(version, end) for version, end in enumerate(ends, start=1)]
    sample.finish_reason = FinishReason.STOP
    sample.reward = reward
    return sample


def identity(group: int = 5) -> Identity:
    return Identity(
        group=group,
        attempt=0,
        epoch=0,
        prompt_index=2,
        prompt="a prompt",
        label="a label",
        metadata={"source": "test"},
        sampling=TokenSampling(temperature=0.7, top_p=0.9),
        started_s=1.0,
    )
