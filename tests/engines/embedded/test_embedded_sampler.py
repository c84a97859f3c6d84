"""Draws follow the distribution that the parameters ask for, and depend on a request's own seed alone."""

from typing import Any

import numpy as np
import pytest
import torch

from fa_rollout.engines.embedded.model.logit_adjuster import LogitAdjuster
from fa_rollout.engines.embedded.model.request import GenerationRequest
from fa_rollout.engines.embedded.model.sampler import sample, uniforms
from fa_rollout.engines.embedded.model.sampling_params import SamplingParams

VOCAB_SIZE = 12
LOGITS_V = torch.linspace(-2.0, 2.0, VOCAB_SIZE)[torch.randperm(VOCAB_SIZE, generator=torch.manual_seed(3))]


def make_request(seed: int, *, num_prompt: int = 3, num_top: int = 0, **params: Any) -> GenerationRequest:
    return GenerationRequest(
        rid=str(seed),
        prompt_ids=[1] * num_prompt,
        params=SamplingParams(**params),
        max_new_tokens=10,
        seed=seed,
        num_top=num_top,
    )


def frequencies(num: int = 20_000, **params: Any) -> torch.Tensor:
    requests = [make_request(seed, **params) for seed in range(num)]
    tokens = sample(LOGITS_V.repeat(num, 1), requests).token_ids
    return torch.bincount(torch.tensor(tokens), minlength=VOCAB_SIZE) / num


def assert_drawn_from(found_V: torch.Tensor, expected_V: torch.Tensor) -> None:
    assert (found_V[expected_V == 0] == 0).all()
    assert found_V.tolist() == pytest.approx(expected_V.tolist(), abs=0.015)


def renormalised(probs_V: torch.Tensor, kept_V: torch.Tensor) -> torch.Tensor:
    cut_V = torch.where(kept_V, probs_V, 0.0)
    return cut_V / cut_V.sum()


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    for temperature in (0.5, 1.0, 2.0):
        expected_V = torch.softmax(LOGITS_V / temperature, -1)
        assert_drawn_from(frequencies(temperature=temperature), expected_V)


def test_top_k_top_p_and_min_p_cut_the_distribution() -> None:
    probs_V = torch.softmax(LOGITS_V, -1)
    ranks_V = probs_V.argsort(descending=True).argsort()
    sorted_V = probs_V.sort(descending=True).values
    before_V = (sorted_V.cumsum(0) - sorted_V)[ranks_V]
    assert_drawn_from(frequencies(top_k=4), renormalised(probs_V, ranks_V < 4))
    assert_drawn_from(frequencies(top_p=0.6), renormalised(probs_V, before_V <= 0.6))
    assert_drawn_from(frequencies(min_p=0.3), renormalised(probs_V, probs_V >= 0.3 * probs_V.max()))


def test_greedy_rows_take_the_most_likely_token_beside_sampled_ones() -> None:
    requests = [make_request(seed, temperature=0.0 if seed % 2 else 1.0, top_k=3) for seed in range(40)]
    tokens = sample(LOGITS_V.repeat(40, 1), requests).token_ids
    assert set(tokens[1::2]) == {int(LOGITS_V.argmax())}
    assert len(set(tokens[::2])) == 3


def test_logprobs_are_of_the_whole_distribution_before_the_cut() -> None:
    requests = [make_request(7, temperature=0.5, top_k=2), make_request(8, temperature=0.0)]
    sampled = sample(LOGITS_V.repeat(2, 1), requests)
    halved_V, whole_V = torch.log_softmax(LOGITS_V / 0.5, -1), torch.log_softmax(LOGITS_V, -1)
    assert sampled.logprobs[0] == pytest.approx(halved_V[sampled.token_ids[0]].item(), abs=1e-6)
    assert sampled.logprobs[1] == pytest.approx(whole_V.max().item(), abs=1e-6)


def test_a_rows_token_does_not_depend_on_its_company() -> None:
    generator = torch.manual_seed(0)
    logits_NV = torch.randn(50, VOCAB_SIZE, generator=generator)
    params: list[dict[str, Any]] = [
        {},
        {"top_k": 3},
        {"temperature": 0.0},
        {"top_p": 0.5, "temperature": 2.0},
    ]
    requests = [make_request(seed, num_prompt=seed + 1, **params[seed % 4]) for seed in range(50)]
    together = sample(logits_NV.clone(), requests).token_ids
    alone = [sample(logits_NV[row : row + 1].clone(), [requests[row]]).token_ids[0] for row in range(50)]
    assert together == alone


def test_random_numbers_differ_by_seed_and_by_position() -> None:
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64))
    numbers = uniforms(seeds.ravel(), positions.ravel())
    assert len(np.unique(numbers)) == numbers.size
    assert ((numbers >= 0) & (numbers < 1)).all()
    for axis in (0, 1):
        assert np.abs(numbers.reshape(200, 200).mean(axis=axis) - 0.5).max() < 0.1
    correlation = np.corrcoef(numbers.reshape(200, 200))
    assert np.abs(correlation - np.eye(200)).max() < 0.4


def test_the_largest_random_number_never_draws_what_was_cut() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "fa_rollout.engines.embedded.model.sampler.uniforms", lambda *_: np.array([1.0 - 2.0**-48])
        )
        tokens = sample(LOGITS_V[None].clone(), [make_request(0, top_k=2)]).token_ids
    assert tokens[0] in LOGITS_V.topk(2).indices.tolist()


def test_penalties_bias_and_minimum_length_change_the_logits_and_so_the_logprobs() -> None:
    params = SamplingParams(
        frequency_penalty=0.5,
        presence_penalty=0.25,
        repetition_penalty=1.5,
        min_new_tokens=3,
        logit_bias={"4": 2.0},
    )
    adjuster = LogitAdjuster.create(params, frozenset({2}), VOCAB_SIZE)
    assert adjuster is not None
    for token_id in (5, 5):
        adjuster.observe(token_id)
    expected_V = LOGITS_V.clone()
    expected_V[5] = (LOGITS_V[5] / 1.5 if LOGITS_V[5] > 0 else LOGITS_V[5] * 1.5) - 2 * 0.5 - 0.25
    expected_V[4] += 2.0
    changed_V = LOGITS_V.clone()
    adjuster.apply(changed_V)
    assert changed_V[2] == -torch.inf
    expected_V[2] = -torch.inf
    assert changed_V.tolist() == pytest.approx(expected_V.tolist())
    adjuster.observe(1)
    adjuster.apply(changed_V := LOGITS_V.clone())
    assert changed_V[2] == LOGITS_V[2]


def test_top_entries_are_the_most_likely_tokens_in_order() -> None:
    requests = [make_request(0, num_top=3), make_request(1)]
    top = sample(LOGITS_V.repeat(2, 1), requests).top
    assert top is not None
    assert [token_id for _, token_id in top[0]] == LOGITS_V.topk(3).indices.tolist()
    assert top[1] == []


def test_logits_that_are_not_numbers_are_told() -> None:
    logits_NV = LOGITS_V.repeat(2, 1)
    logits_NV[1, 3] = torch.nan
    assert not sample(logits_NV, [make_request(0), make_request(1)]).are_finite
