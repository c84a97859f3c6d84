"""What else slime's rollouts can be asked for: replays, images, seeds, several models, split engines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fa_rollout
from fa_rollout.data.tokenizer import Tokenizer
from tests.generator.hub_end import VOCAB_SIZE
from tests.kit.scripted import (
    Lengths,
    ScriptedEngine,
    expected_experts,
    expected_kept,
    ids_of_text,
    sequence_key,
)
from tests.slime.kit import CODE, Manager, arguments, assert_true_to_engine, train_async

Engines = Callable[..., tuple[list[ScriptedEngine], str]]
SLOW: dict[str, Any] = {"lengths": Lengths(tokens=60), "tokens_per_s": 100.0}


def requests(engine: ScriptedEngine) -> list[Any]:
    """Without those of probes, and of health checks."""
    return [r for r in engine.requests("/generate") if "probe" not in (r.rid or "")]


def test_the_ids_kept_by_top_p_follow_a_sample_through_aborts_into_the_train_data(
    tmp_path: Path, engines: Engines
) -> None:
    made, router = engines(**SLOW)
    manager = Manager(arguments(tmp_path, router, rollout_top_p=0.9, num_rollout=4))
    train_async(manager, made, steps=range(4))
    assert any(len(sample.weight_versions) > 1 for sample in manager.samples)
    for sample in manager.samples:
        assert_true_to_engine(sample)
        start, stop = len(sample.tokens) - sample.response_length, len(sample.tokens)
        ids, offsets = expected_kept(sequence_key(np.array(sample.tokens[:start])), start, stop, VOCAB_SIZE)
        assert sample.rollout_top_p_token_offsets.tolist() == offsets.tolist()
        assert sample.rollout_top_p_token_ids.tolist() == ids.tolist()
        if len(sample.weight_versions) > 1:
            spelt = Tokenizer.load(manager.args.hf_checkpoint).decode(sample.tokens[start:])
            assert sample.response == spelt, "one decoding of all ids, whatever its pieces were"
    flat = [sample for group in manager.batches[0] for sample in group]
    data = fa_rollout.convert_samples_to_train_data(manager.args, flat)
    assert [len(ids) for ids in data["rollout_top_p_token_ids"]] == [
        offsets[-1] for offsets in data["rollout_top_p_token_offsets"]
    ]


def test_the_experts_of_a_sample_are_those_of_its_whole_sequence(tmp_path: Path, engines: Engines) -> None:
    made, router = engines(experts=(2, 2), **SLOW)
    changes = {"use_rollout_routing_replay": True, "num_rollout": 4}
    manager = Manager(arguments(tmp_path, router, **changes))
    train_async(manager, made, steps=range(4))
    assert any(len(sample.weight_versions) > 1 for sample in manager.samples)
    for sample in manager.samples:
        assert_true_to_engine(sample)
        expected = expected_experts(len(sample.tokens) - 1, (2, 2))
        assert sample.rollout_routed_experts.tolist() == expected.tolist()
    flat = [sample for group in manager.batches[0] for sample in group]
    data = fa_rollout.convert_samples_to_train_data(manager.args, flat)
    assert [e.shape[0] for e in data["rollout_routed_experts"]] == [len(s.tokens) - 1 for s in flat]


def test_prompts_with_images_go_the_way_of_slimes_own_function(tmp_path: Path, engines: Engines) -> None:
    made, router = engines()
    manager = Manager(arguments(tmp_path, router, multimodal_keys={"image": "images"}, num_rollout=2))
    train_async(manager, made, steps=range(2))
    asked = requests(made[0])
    assert [r.body["num_images"] for r in asked] == [1] * len(manager.samples)
    assert not any(r.rid and "-m" in r.rid for r in asked)
    for sample in manager.samples:
        assert sample.multimodal_inputs == {"images": ["an image"]}
        assert sample.multimodal_train_inputs == {"pixels": [len("an image")]}
        assert sample.status == type(sample).Status.COMPLETED
    texts = [ids_of_text(sample.prompt, VOCAB_SIZE)[:16] for sample in manager.samples]
    assert sorted(r.input_ids_start for r in asked) == sorted(texts)


def test_each_member_of_a_group_has_its_own_seed_and_keeps_it(tmp_path: Path, engines: Engines) -> None:
    made, router = engines(**SLOW)
    changes = {"sglang_enable_deterministic_inference": True, "num_rollout": 3}
    manager = Manager(arguments(tmp_path, router, **changes))
    train_async(manager, made, steps=range(3))
    seeds = [r.body["sampling_params"]["sampling_seed"] for r in requests(made[0])]
    assert set(seeds) == {42, 43}
    resumed = sum(len(sample.weight_versions) - 1 for sample in manager.samples)
    assert resumed > 0
    assert len(seeds) >= len(manager.samples) + resumed


def test_sessions_stay_on_one_engine_where_the_router_hashes(tmp_path: Path, engines: Engines) -> None:
    made, router = engines(**SLOW)
    manager = Manager(arguments(tmp_path, router, router_policy="consistent_hashing", num_rollout=3))
    train_async(manager, made, steps=range(3))
    keys = [r.routing_key for r in requests(made[0])]
    assert set(keys) == {sample.session_id for sample in manager.samples}, "aborted answers keep their own"
    assert len(keys) > len(set(keys)) == len(manager.samples)


def test_a_sample_with_a_generate_function_of_its_own_is_made_by_that_alone(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, router = engines()
    monkeypatch.setenv("STANDIN_IMPORT_S", "2")
    manager = Manager(arguments(tmp_path, router, num_rollout=1))
    take = manager.source.get_samples

    def get_samples(num_samples: int) -> list[list[Any]]:
        groups = take(num_samples)
        for group in groups:
            for sample in group:
                sample.generate_function_path = f"{CODE}.one_turn"
        return groups

    monkeypatch.setattr(manager.source, "get_samples", get_samples)
    train_async(manager, made, steps=range(1))
    assert all(sample.metadata["by"] == "one_turn" for sample in manager.samples)
    assert len(requests(made[0])) == len(manager.samples)


def test_a_generate_function_reaches_other_models_by_their_names(tmp_path: Path, engines: Engines) -> None:
    made, router = engines()
    (judge,), other = engines()
    changes = {
        "custom_generate_function_path": f"{CODE}.judged_by_another_model",
        "sglang_model_routers": {"judge": other.removeprefix("http://").split(":")},
        "sglang_config": "models.yaml",
        "num_rollout": 2,
    }
    manager = Manager(arguments(tmp_path, router, **changes))
    train_async(manager, made, steps=range(2))
    assert len(requests(judge)) == len(requests(made[0])) == len(manager.samples) == 16
    for sample in manager.samples:
        assert_true_to_engine(sample)
        assert len(sample.metadata["verdict"]) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill_num_servers": 1},
        {"rollout_external_engine_infos": [{"worker_type": "prefill"}, {"worker_type": "decode"}]},
    ],
)
def test_engines_split_into_prefill_and_decode_are_left_to_slimes_own_function(
    tmp_path: Path, engines: Engines, changes: dict[str, Any]
) -> None:
    made, router = engines()
    manager = Manager(arguments(tmp_path, router, num_rollout=2, **changes))
    train_async(manager, made, steps=range(2))
    assert {r.rid for r in requests(made[0])} == {""}, "the router makes the ids that both halves share"
    for sample in manager.samples:
        assert_true_to_engine(sample)
    assert sorted(manager.trained) == list(range(8))
