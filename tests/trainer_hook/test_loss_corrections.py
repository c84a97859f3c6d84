"""Losses and corrections against transcriptions of the papers' formulas in numpy, token by token."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from trainer_hook import losses

Floats = npt.NDArray[np.float64]

SAMPLES = np.array([0, 0, 0, 0, 1, 1, 2, 2, 2])
MASK = np.array([0, 1, 1, 1, 1, 0, 1, 1, 1], np.float64)
ADVANTAGES = np.array([1, 1, 1, 1, -0.5, -0.5, 2, 2, 2], np.float64)


def logprobs(seed: int) -> Floats:
    return -np.abs(np.random.default_rng(seed).normal(1.0, 0.6, len(SAMPLES)))


NEW, PROXIMAL, SAMPLED = logprobs(1), logprobs(2), logprobs(3)


def tensor(values: Floats) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def values_of(found: torch.Tensor) -> Floats:
    return found.detach().numpy() * MASK


def of_sample(one: int) -> npt.NDArray[np.bool_]:
    return (one == SAMPLES) & (MASK > 0)


def clip_of(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def by_token(formula: Callable[[int], float]) -> Floats:
    return np.array([formula(t) if MASK[t] else 0.0 for t in range(len(SAMPLES))])


def test_ppo_clip() -> None:
    found = losses.ppo_clip(tensor(NEW), tensor(SAMPLED), tensor(ADVANTAGES), low=0.1, high=0.3)
    expected = by_token(lambda t: clip_of(np.exp(NEW[t] - SAMPLED[t]), ADVANTAGES[t], 0.1, 0.3))
    np.testing.assert_allclose(values_of(found), expected, atol=1e-6)


def test_dual_clip_bounds_what_a_negative_advantage_costs() -> None:
    new, old, advantages = tensor(np.array([2.0, 2.0])), tensor(np.zeros(2)), tensor(np.array([-1.0, 1.0]))
    found = losses.ppo_clip(new, old, advantages, dual=3.0)
    np.testing.assert_allclose(found.numpy(), [3.0, -1.2], atol=1e-6)


def test_decoupled_ppo() -> None:
    found = losses.decoupled_ppo(
        tensor(NEW), tensor(PROXIMAL), tensor(SAMPLED), tensor(ADVANTAGES), tensor(MASK), cap=1.5
    )

    def expected(t: int) -> float:
        weight = min(np.exp(PROXIMAL[t] - SAMPLED[t]), 1.5)
        return weight * clip_of(np.exp(NEW[t] - PROXIMAL[t]), ADVANTAGES[t], 0.2, 0.2)

    np.testing.assert_allclose(values_of(found), by_token(expected), atol=1e-6)


def test_gspo_uses_the_geometric_mean_ratio_of_the_sample() -> None:
    def ratio(t: int) -> float:
        return float(np.exp((NEW - SAMPLED)[of_sample(SAMPLES[t])].mean()))

    def found_for(new: torch.Tensor) -> torch.Tensor:
        return losses.gspo(
            new,
            tensor(SAMPLED),
            tensor(ADVANTAGES),
            tensor(MASK),
            torch.tensor(SAMPLES),
            low=0.05,
            high=0.05,
        )

    expected = by_token(lambda t: clip_of(ratio(t), ADVANTAGES[t], 0.05, 0.05))
    np.testing.assert_allclose(values_of(found_for(tensor(NEW))), expected, atol=1e-6)

    # d/d logprob of an unclipped token is -ratio x advantage, of a clipped one 0.
    new = tensor(NEW).requires_grad_()
    (found_for(new) * tensor(MASK)).sum().backward()
    assert new.grad is not None

    def gradient(t: int) -> float:
        is_clipped = clip_of(ratio(t), ADVANTAGES[t], 0.05, 0.05) != -ratio(t) * ADVANTAGES[t]
        return 0.0 if is_clipped else -ratio(t) * ADVANTAGES[t]

    np.testing.assert_allclose(new.grad.numpy(), by_token(gradient), atol=1e-6)


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    new = tensor(NEW).requires_grad_()
    found = losses.cispo(new, tensor(SAMPLED), tensor(ADVANTAGES), high=0.2)
    weight = np.minimum(np.exp(NEW - SAMPLED), 1.2)
    np.testing.assert_allclose(values_of(found), -weight * ADVANTAGES * NEW * MASK, atol=1e-6)
    (found * tensor(MASK)).sum().backward()
    assert new.grad is not None
    np.testing.assert_allclose(new.grad.numpy(), -weight * ADVANTAGES * MASK, atol=1e-6)


def test_truncated_weights_by_token_and_by_sequence() -> None:
    log_ratios = tensor(NEW - SAMPLED)
    found = losses.truncated_weights(log_ratios, tensor(MASK), cap=1.3)
    np.testing.assert_allclose(found.numpy(), np.minimum(np.exp(NEW - SAMPLED), 1.3) * MASK, atol=1e-6)

    of_sequences = losses.sequence_log_ratios(log_ratios, tensor(MASK), torch.tensor(SAMPLES))
    found = losses.truncated_weights(of_sequences, tensor(MASK), cap=1.3)
    expected = by_token(lambda t: min(np.exp((NEW - SAMPLED)[of_sample(SAMPLES[t])].sum()), 1.3))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def test_masked_weights_leave_out_what_lies_outside_of_the_bounds() -> None:
    ratios = np.exp(NEW - SAMPLED)
    found = losses.masked_weights(tensor(NEW - SAMPLED), tensor(MASK), low=0.6, high=1.5)
    kept = (ratios >= 0.6) & (ratios <= 1.5)
    assert 0 < (kept * MASK).sum() < MASK.sum()
    np.testing.assert_allclose(found.numpy(), ratios * kept * MASK, atol=1e-6)


def test_the_geometric_mask_keeps_or_drops_whole_samples() -> None:
    means = [np.exp((NEW - SAMPLED)[of_sample(one)].mean()) for one in range(3)]
    low, high = sorted(means)[1] - 1e-3, sorted(means)[1] + 1e-3
    found = losses.geometric_sequence_mask(
        tensor(NEW - SAMPLED), tensor(MASK), torch.tensor(SAMPLES), low=low, high=high
    )
    np.testing.assert_array_equal(found.numpy(), MASK * (means.index(sorted(means)[1]) == SAMPLES))


@pytest.mark.parametrize("outside", [np.inf, np.nan])
def test_what_stands_outside_of_the_mask_reaches_no_sequence(outside: float) -> None:
    spoilt = np.where(MASK > 0, NEW - SAMPLED, outside)
    arguments: Sequence[torch.Tensor] = (tensor(MASK), torch.tensor(SAMPLES))
    found = losses.sequence_log_ratios(tensor(spoilt), *arguments)
    expected = losses.sequence_log_ratios(tensor(NEW - SAMPLED), *arguments)
    np.testing.assert_array_equal(found.numpy(), expected.numpy())
