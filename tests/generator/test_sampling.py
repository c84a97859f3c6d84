"""Sampling parameters: a dict of its own for each request, seeds that are stable and all different."""

import itertools

from fa_rollout.config import Sampling
from fa_rollout.generator.turns.sampling import base_params, continuation_params, sample_seed, token_sampling
from trainer_hook.record import TokenSampling


def test_parameters_are_named_as_engines_name_them_and_shared_with_nobody() -> None:
    sampling = Sampling(stop=["\n"], stop_token_ids=[7], top_k=5, min_p=0.1)
    first, second = base_params(sampling), base_params(sampling)
    assert first == {
        "max_new_tokens": 512,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 5,
        "min_p": 0.1,
        "ignore_eos": False,
        "stop": ["\n"],
        "stop_token_ids": [7],
    }
    first["stop"].append("x")
    first["temperature"] = 0.0
    assert second["stop"] == sampling.stop == ["\n"]
    assert second["temperature"] == 1.0


def test_a_continuation_has_the_rest_of_the_budget_and_leaves_the_original_alone() -> None:
    params = {"max_new_tokens": 10, "min_new_tokens": 6}
    assert continuation_params(params, num_done=0) == params
    assert continuation_params(params, num_done=4) == {"max_new_tokens": 6, "min_new_tokens": 2}
    assert continuation_params(params, num_done=8) == {"max_new_tokens": 2, "min_new_tokens": 0}
    assert params == {"max_new_tokens": 10, "min_new_tokens": 6}


def test_seeds_differ_by_every_part_of_a_requests_identity() -> None:
    parts = itertools.product(range(2), range(3), range(3), range(2), range(3))
    seeds = [
        sample_seed(seed, group=group, member=member, attempt=attempt, serial=serial)
        for seed, group, member, attempt, serial in parts
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_is_the_same_on_every_machine_and_in_every_run() -> None:
    assert sample_seed(1, group=2, member=3, attempt=0, serial=0) == 7583626936618798344


def test_what_the_trainer_learns_of_a_token_is_what_its_request_said() -> None:
    found = token_sampling(
        {"temperature": 0, "top_k": 5, "top_p": None, "stop": ["x"], "presence_penalty": 1}
    )
    assert found == TokenSampling(temperature=0.0, top_k=5, presence_penalty=1.0)
    assert found.logprob_temperature == 1.0
    assert token_sampling({"temperature": 0.5}).logprob_temperature == 0.5
