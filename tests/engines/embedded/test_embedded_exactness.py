"""The engine's numbers are those of the model's own forward pass, whoever else runs beside a request."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from fa_rollout.engines.embedded.engine.engine import PauseMode, StepEngine
from fa_rollout.engines.embedded.engine.scheduler import Limits
from fa_rollout.engines.embedded.errors import UnsupportedModel
from fa_rollout.engines.embedded.model.request import FinishKind, GenerationRequest
from fa_rollout.engines.embedded.model.runner import Runner
from fa_rollout.engines.embedded.model.sampling_params import SamplingParams
from tests.engines.reference import reference_logprobs

TOLERANCE = 1e-4
SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
}


def write(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_engine(folder: Path, **limits: int) -> StepEngine:
    runner = Runner(folder)
    defaults = {
        "context_length": runner.context_length,
        "max_running_requests": 64,
        "max_total_tokens": 1 << 16,
        "max_prefill_tokens": 128,
    }
    return StepEngine(runner, Limits(**(defaults | limits)), weight_version="0")


def make_request(rid: str, prompt: list[int], num_new: int, **params: Any) -> GenerationRequest:
    return GenerationRequest(
        rid=rid,
        prompt_ids=prompt,
        params=SamplingParams(max_new_tokens=num_new, **params),
        max_new_tokens=num_new,
        seed=hash(rid) & 0xFFFF_FFFF,
        return_logprob=True,
    )


def random_requests(num: int, *, seed: int = 0, **params: Any) -> list[GenerationRequest]:
    generator = np.random.default_rng(seed)
    return [
        make_request(
            f"r{index}",
            generator.integers(1, 40, generator.integers(1, 30)).tolist(),
            int(generator.integers(1, 40)),
            **params,
        )
        for index in range(num)
    ]


def run(engine: StepEngine) -> None:
    while engine.has_work:
        engine.step()


def assert_exact(model: Any, request: GenerationRequest) -> None:
    expected = reference_logprobs(model, request.prompt_ids, request.output_ids, request.temperature)
    assert request.output_logprobs == pytest.approx(expected, abs=TOLERANCE)


def greedy_reference(model: Any, prompt: list[int], num_new: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_new,
        do_sample=False,
    )
    return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(CONFIGS[request.param], tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def test_greedy_output_equals_generate_while_requests_join_leave_and_abort(folder: Path, model: Any) -> None:
    engine = make_engine(folder, max_running_requests=6)
    requests = random_requests(20, temperature=0.0)
    for index, request in enumerate(requests):
        engine.submit([request])
        engine.step()
        if index == 12:
            doomed = next(request for request in requests if request.finish is None and request.output_ids)
            engine.abort(lambda request, doomed=doomed: request is doomed)
    run(engine)
    assert doomed.finish is not None
    assert doomed.finish.kind is FinishKind.ABORT
    for request in requests:
        expected = greedy_reference(model, request.prompt_ids, request.max_new_tokens)
        if request is doomed:
            assert 0 < len(request.output_ids) < len(expected)
        assert request.output_ids == expected[: len(request.output_ids)]
        assert_exact(model, request)


def test_sampled_logprobs_equal_a_forward_pass_at_the_requests_own_temperature(
    folder: Path, model: Any
) -> None:
    engine = make_engine(folder)
    requests = random_requests(12, temperature=0.7) + random_requests(12, seed=1, temperature=1.3, top_k=5)
    engine.submit(requests)
    run(engine)
    for request in requests:
        assert request.finish is not None
        assert len(request.output_ids) == request.max_new_tokens
        assert_exact(model, request)


def test_prompt_logprobs_equal_a_forward_pass_at_temperature_one(folder: Path, model: Any) -> None:
    engine = make_engine(folder)
    requests = random_requests(5, temperature=0.5)
    for start, request in enumerate(requests):
        request.logprob_start = min(start, len(request.prompt_ids) - 1)
    engine.submit(requests)
    run(engine)
    for request in requests:
        first = (request.logprob_start or 0) + 1
        expected = reference_logprobs(model, request.prompt_ids[:first], request.prompt_ids[first:])
        assert request.input_logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_equal_prompts_are_computed_once_and_stay_exact(folder: Path, model: Any) -> None:
    engine = make_engine(folder)
    prompt = [5, 3, 7, 2, 11, 4]
    requests = [make_request(f"s{index}", prompt, 12) for index in range(8)]
    requests.insert(3, make_request("other", [9, 9], 12))
    engine.submit(requests)
    run(engine)
    assert [request.num_cached_tokens for request in requests] == [0, 5, 5, 0, 5, 5, 5, 5, 5]
    assert len({tuple(request.output_ids) for request in requests}) > 4
    for request in requests:
        assert_exact(model, request)


def test_retracted_requests_continue_exactly(folder: Path, model: Any) -> None:
    engine = make_engine(folder)
    requests = random_requests(9)
    engine.submit(requests)
    for _ in range(4):
        engine.step()
    engine.pause(PauseMode.RETRACT)
    assert not engine.has_work
    engine.resume()
    run(engine)
    for request in requests:
        assert_exact(model, request)
    assert any(request.num_retractions == 1 for request in requests)


def test_a_full_cache_makes_requests_wait_and_nothing_else(folder: Path, model: Any) -> None:
    engine = make_engine(folder, max_total_tokens=256, max_running_requests=64)
    requests = random_requests(16)
    engine.submit(requests)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.statistics().num_running)
    assert 1 < most < 16
    for request in requests:
        assert_exact(model, request)


def test_a_model_that_would_be_run_inexactly_is_refused(tmp_path: Path) -> None:
    config = MistralConfig(**SMALL, sliding_window=3)
    with pytest.raises(UnsupportedModel, match="must equal its own forward pass"):
        Runner(write(config, tmp_path))
