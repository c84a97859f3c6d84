"""Diagnostics and the batch's own figures, on records as trainers see them."""

import math

import numpy as np
import pytest
import torch
from peer import Completion, Ring, batch_of

from trainer_hook.batches.batch import Batch, MicroBatch
from trainer_hook.losses import Diagnostics, diagnose, policy_loss, version_mask
from trainer_hook.messages import Part

SAMPLES = [
    Completion(prompt=[1, 2], response=[3, 4, 5], reward=1.0, spans=[(3, 1), (5, 3)], mask=[1, 1, 0]),
    Completion(prompt=[6], response=[7, 8], reward=0.0, spans=[(-1, 2)]),
]
"""Response tokens at positions 2, 3, 4 and 6, 7 of the packed micro-batch; the batch trains version 5."""


def batch() -> Batch:
    ring = Ring()
    return batch_of(ring, [ring.write(0, SAMPLES)], [[Part(0, 0), Part(0, 1)]], copy=True)


def micro_batch_of() -> MicroBatch:
    return batch().micro_batches()[0]


def test_versions_and_staleness_are_those_of_the_spans() -> None:
    micro_batch = micro_batch_of()
    assert micro_batch.versions.tolist() == [-1, -1, 3, 5, 5, -1, -1, -1]
    assert micro_batch.staleness.tolist() == [-1, -1, 2, 0, 0, -1, -1, -1]
    assert micro_batch.response_mask.tolist() == [False, False, True, True, True, False, True, True]


def test_a_version_mask_keeps_trained_tokens_of_known_and_new_enough_versions() -> None:
    assert version_mask(micro_batch_of(), oldest=4).tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert version_mask(micro_batch_of(), oldest=-3).tolist() == [0, 0, 1, 1, 0, 0, 0, 0]


def test_diagnostics_count_each_trained_token_once_and_by_staleness() -> None:
    micro_batch = micro_batch_of()
    shifts = torch.tensor([9.0, 9.0, 0.5, -0.1, 9.0, 9.0, 0.0, 0.2])
    found = diagnose(micro_batch.logprobs + shifts, micro_batch, low=0.2, high=0.28)

    log_ratios = np.array([0.5, -0.1, 0.0, 0.2])
    ratios = np.exp(log_ratios)
    total = found.total
    assert total.num_tokens == 4
    assert total.effective_sample_share == pytest.approx(ratios.sum() ** 2 / (4 * (ratios**2).sum()))
    assert total.kl_k1 == pytest.approx(-log_ratios.mean())
    assert total.kl_k3 == pytest.approx((ratios - 1 - log_ratios).mean())
    assert total.mean_abs == pytest.approx(0.2)
    assert total.max_abs == pytest.approx(0.5)
    assert total.clipped_share == pytest.approx(0.25)
    assert {staleness: gap.num_tokens for staleness, gap in found.by_staleness.items()} == {2: 1, 0: 1, -1: 2}
    assert found.by_staleness[2].max_abs == pytest.approx(0.5)


def test_diagnostics_of_micro_batches_add_up() -> None:
    micro_batch = micro_batch_of()
    once, twice = diagnose(micro_batch.logprobs + 0.3, micro_batch), Diagnostics()
    twice.add(once)
    twice.add(once)
    assert twice.total.num_tokens == 2 * once.total.num_tokens
    assert twice.total.kl_k3 == pytest.approx(once.total.kl_k3)
    assert twice.total.max_abs == once.total.max_abs
    assert once.total.num_tokens == 4


def test_the_loss_scale_makes_averaged_gradients_those_of_the_mean_over_all_tokens() -> None:
    """`batch_of` makes the part of one of two ranks, of a step with 7 trained tokens."""
    assert batch().loss_scale == pytest.approx(2 / 7)


def test_the_default_loss_is_zero_outside_of_the_mask_and_trains_the_rest() -> None:
    micro_batch = micro_batch_of()
    logprobs = micro_batch.logprobs.clone().requires_grad_()
    loss = policy_loss(logprobs, micro_batch)
    loss.sum().backward()
    advantage = 0.5 / (math.sqrt(0.5) + 1e-6)
    expected = [0, 0, -advantage, -advantage, 0, 0, advantage, advantage]
    np.testing.assert_allclose(loss.detach().numpy(), expected, atol=1e-5)
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), expected, atol=1e-5)
