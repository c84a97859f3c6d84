"""The small model is one that transformers loads as it is, weights, tokenizer and chat template."""

from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from fa_rollout.engines.tiny_model import BOS_ID, EOS_ID, write_tiny_model


def test_transformers_loads_model_and_tokenizer(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, characters="ab1 \n", hidden=32, layers=3, heads=4, context=64)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert model.config.max_position_embeddings == 64
    assert model.generation_config.eos_token_id == EOS_ID
    assert model(torch.tensor([[1, 3, 4]])).logits.shape == (1, 3, 8)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "ab1"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<bos>ab1"
    assert tokenizer("ab1").input_ids == [BOS_ID, 3, 4, 5]


def test_text_survives_the_tokenizer_and_foreign_characters_are_an_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_tiny_model(tmp_path, characters="ab1 \n") / "tokenizer.json"))
    text = "a b\n1  b"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("z")


def test_the_seed_makes_the_weights(tmp_path: Path) -> None:
    weights = [
        load_file(write_tiny_model(tmp_path / str(index), characters="ab", seed=seed) / "model.safetensors")
        for index, seed in enumerate((0, 0, 1))
    ]
    name = "lm_head.weight"
    assert (weights[0][name] == weights[1][name]).all()
    assert (weights[0][name] != weights[2][name]).any()
    assert weights[0][name].std() == pytest.approx(0.02, rel=0.2)


def test_characters_must_differ(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must differ"):
        write_tiny_model(tmp_path, characters="aa")
