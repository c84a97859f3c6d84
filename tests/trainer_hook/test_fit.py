"""What is pushed are the weights of the engines' model; else an error, before anything is sent."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trainer_hook.errors import WeightsMismatch
from trainer_hook.model.fit import check_kinds, fitting
from trainer_hook.model.index import ModelIndex, NoIndex
from trainer_hook.weights.gathering import Gathering, on_host

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
Tensors = dict[str, torch.Tensor]


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, **changes))


def qwen_moe() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SMALL, moe_intermediate_size=8, num_experts=4, head_dim=8)
    return Qwen3MoeForCausalLM(config)


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=3))


def saved(model: PreTrainedModel, folder: Path) -> ModelIndex:
    model.save_pretrained(folder)
    return ModelIndex.read(folder)


def pushed(
    source: Any, index: ModelIndex | None, *, partial: bool = False, bucket_bytes: int = 2000
) -> Tensors:
    weights = Gathering(fitting(source, index, partial=partial), bucket_bytes)
    buckets = list(weights.buckets(on_host))
    assert len(buckets) == weights.num_buckets
    names = [name for bucket in buckets for name in bucket]
    assert len(names) == len(set(names))
    assert set(names) == set(weights.sizes)
    tensors = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
    for bucket in buckets:
        assert len(bucket) <= 1 or sum(weights.sizes[name] for name in bucket) <= bucket_bytes
    return tensors


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def refusal(source: Any, index: ModelIndex | None, *, partial: bool = False) -> str:
    with pytest.raises(WeightsMismatch) as caught:
        fitting(source, index, partial=partial)
    return str(caught.value)


# --- names, shapes, types, coverage ---------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_pushed_as_its_files_have_it(tied: bool, tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=tied)
    index = saved(model, tmp_path)
    for source in (model, model.state_dict(), {f"module.{n}": t for n, t in model.state_dict().items()}):
        assert_same(pushed(source, index), load_file(tmp_path / "model.safetensors"))


def test_names_that_the_engines_model_lacks_are_refused(tmp_path: Path) -> None:
    model = llama()
    index = saved(model, tmp_path)
    text = refusal(model.state_dict() | {"v_head.weight": torch.zeros(3)}, index)
    assert "1 unknown to it (v_head.weight)" in text
    assert "Nothing was sent" in text


def test_a_part_is_refused_unless_it_is_declared(tmp_path: Path) -> None:
    model = llama()
    index = saved(model, tmp_path)
    half = dict(list(model.state_dict().items())[::2])
    text = refusal(half, index)
    assert "of its own missing (" in text
    assert "and 7 more)" in text
    assert "partial=True" in text
    assert_same(pushed(half, index, partial=True), half)


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"]
)
def test_a_shape_that_is_a_row_short_is_refused(name: str, tmp_path: Path) -> None:
    model = llama()
    index = saved(model, tmp_path)
    state = model.state_dict()
    short = state[name][:-1]
    text = refusal(state | {name: short}, index)
    assert f"1 of another shape ({name} {list(short.shape)}, there {list(state[name].shape)})" in text
    assert "of another shape" in refusal({name: short}, index, partial=True)


def test_floats_of_any_width_are_pushed_and_other_types_are_refused(tmp_path: Path) -> None:
    model = llama()
    index = saved(model, tmp_path)
    half = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    assert_same(pushed(half, index), half)
    name = "model.layers.0.mlp.up_proj.weight"
    assert f"{name} F8_E4M3, there F32" in refusal(half | {name: half[name].to(torch.float8_e4m3fn)}, index)


def test_a_prefix_in_front_of_all_names_is_named(tmp_path: Path) -> None:
    model = llama()
    index = saved(model, tmp_path)
    wrapper = nn.ModuleDict({"policy": model})
    assert "begin with 'policy.'" in refusal(wrapper, index)


def test_tables_that_engines_compute_themselves_are_left_out(tmp_path: Path) -> None:
    model = llama()
    index = saved(model, tmp_path)
    model.model.register_buffer("seen", torch.zeros(3))
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    expected = load_file(tmp_path / "model.safetensors")
    assert_same(pushed(model, index), expected)
    assert_same(pushed(expected | extra, index), expected)


def test_a_head_that_engines_tie_is_left_out_if_it_is_the_same_and_refused_if_not(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    index = saved(model, tmp_path)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert_same(pushed(state, index), load_file(tmp_path / "model.safetensors"))
    state["lm_head.weight"] += 1
    assert "tie_word_embeddings" in refusal(state, index)


def test_a_tied_trainer_of_an_untied_model_sends_both_names(tmp_path: Path) -> None:
    index = saved(llama(), tmp_path)
    model = llama(tie_word_embeddings=True)
    found = pushed(model, index)
    assert found.keys() == index.kinds.keys()
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


def test_several_files_are_read_by_their_index(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    save_file({"leftover": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert pushed(model, ModelIndex.read(tmp_path)).keys() == model.state_dict().keys()


@pytest.mark.parametrize("content", [None, b"\x10", b"\xff" * 16])
def test_a_folder_without_readable_files_is_no_index(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(NoIndex):
        ModelIndex.read(tmp_path)


def test_without_an_index_a_model_is_pushed_by_the_names_of_its_files() -> None:
    model = llama()
    assert_same(pushed(model, None), model.state_dict())


def test_a_folder_that_the_trainer_has_written_is_compared_too(tmp_path: Path) -> None:
    index = saved(llama(), tmp_path / "model")
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "mine")
    with pytest.raises(WeightsMismatch, match=r"missing \(lm_head.weight\)"):
        check_kinds(ModelIndex.read(tmp_path / "mine").kinds, index)
    check_kinds(index.kinds, index)


# --- models whose names in memory differ from those in files --------------------------------------------


@pytest.mark.parametrize("make", [qwen_moe, mixtral])
@pytest.mark.parametrize("has_index", [True, False])
def test_experts_are_pushed_by_the_names_of_files(make: Any, has_index: bool, tmp_path: Path) -> None:
    index = saved(make(), tmp_path)
    for model in (make(), make().from_pretrained(tmp_path)):
        found = pushed(model, index if has_index else None, bucket_bytes=600)
        assert_same(found, load_file(tmp_path / "model.safetensors"))


def test_fused_experts_of_a_state_dict_are_refused_with_the_way_out(tmp_path: Path) -> None:
    model = qwen_moe()
    index = saved(model, tmp_path)
    for text in (refusal(model.state_dict(), index), refusal(model.state_dict(), None)):
        assert "mlp.experts.gate_up_proj" in text
        assert "push the model itself" in text


def test_a_vision_model_is_pushed_by_the_names_that_it_was_loaded_with(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2VLConfig(
        text_config={**SMALL, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 2},
    )
    model = Qwen2VLForConditionalGeneration(config)
    index = saved(model, tmp_path)
    loaded = Qwen2VLForConditionalGeneration.from_pretrained(tmp_path)
    for source in (model, loaded):
        assert_same(pushed(source, index), load_file(tmp_path / "model.safetensors"))


# --- adapters -------------------------------------------------------------------------------------------


def adapted_by(model: PreTrainedModel, config: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT uses what transformers is about to drop
        return pytest.importorskip("peft").get_peft_model(model, config)


def with_lora(model: PreTrainedModel, **changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    plain = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj", "embed_tokens"]}
    adapted = adapted_by(model, peft.LoraConfig(**{**plain, **changes}))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(parameter)
    return adapted


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_rslora": True},
        {"modules_to_save": ["lm_head", "norm"]},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj"], "bias": "all"},
    ],
)
def test_lora_is_merged_on_the_way_and_the_trained_model_stays_as_it_is(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    index = saved(llama(), tmp_path)
    model = with_lora(llama(), **changes)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = pushed(model, index)
    assert_same(dict(model.state_dict()), before)
    assert_same(pushed(model, None), found)
    assert_same(found, dict(model.merge_and_unload().state_dict()))


def test_of_several_adapters_the_active_ones_are_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    index = saved(llama(), tmp_path)
    model = with_lora(llama(), target_modules=["q_proj"])
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    both = pushed(model, index)
    model.set_adapter("other")
    other = pushed(model, index)
    with model.disable_adapter():
        assert_same(pushed(model, index), load_file(tmp_path / "model.safetensors"))
    model.merge_adapter()
    assert_same(pushed(model, index), other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that the active adapter has not
        model.unmerge_adapter()
    model.base_model.set_adapter(["default", "other"])
    assert_same(both, dict(model.merge_and_unload().state_dict()))


def test_lora_beside_experts_is_merged_and_named_as_in_files(tmp_path: Path) -> None:
    index = saved(qwen_moe(), tmp_path)
    model = with_lora(qwen_moe(), target_modules=["q_proj"])
    found = pushed(model, index)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert_same(found, load_file(tmp_path / "merged/model.safetensors"))


@pytest.mark.parametrize("changes", [{"use_dora": True, "target_modules": ["q_proj"]}, {"lora_bias": True}])
def test_adapters_that_cannot_be_merged_are_refused_by_name(changes: dict[str, Any]) -> None:
    model = with_lora(llama(attention_bias=True, mlp_bias=True), **{"target_modules": ["q_proj"], **changes})
    text = refusal(model, None)
    assert "q_proj" in text
    assert "merge_adapter" in text


def test_other_kinds_of_adapters_are_refused_by_name() -> None:
    peft = pytest.importorskip("peft")
    ia3 = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    assert "k_proj" in refusal(adapted_by(llama(), ia3), None)
    assert "adapters must be merged" in refusal(adapted_by(llama(), prompt), None)


def test_a_state_dict_with_adapters_is_refused_with_the_way_out(tmp_path: Path) -> None:
    index = saved(llama(), tmp_path)
    state = {
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight": torch.zeros(2, 2),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.zeros(2, 2),
    }
    for known in (index, None):
        assert "push the PEFT model itself" in refusal(state, known)


def test_a_config_that_is_no_object_ties_nothing(tmp_path: Path) -> None:
    saved(llama(), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    assert not ModelIndex.read(tmp_path).ties_head
