"""Engines, and a model's folder, for the real slime."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fa_rollout.engines.scripted import Lengths, Script, ScriptedEngine
from tests.slime.real.checkout import PYTHON, environment


@pytest.fixture
def engines() -> Iterator[Callable[..., list[ScriptedEngine]]]:
    started: list[ScriptedEngine] = []

    def start(num_engines: int, **script: Any) -> list[ScriptedEngine]:
        plain = {
            "protocol": "0.5.15",
            "vocab_size": 300,
            "lengths": Lengths(kind="lognormal", tokens=40, high=200),
        }
        made = [ScriptedEngine.start(Script(**(plain | script))) for _ in range(num_engines)]
        started.extend(made)
        return made

    yield start
    for engine in started:
        engine.stop()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, a shape and some prompts, as slime reads them."""
    folder = tmp_path_factory.mktemp("model")
    code = (
        "import sys; from tokenizers import Tokenizer, models, pre_tokenizers\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "letters = pre_tokenizers.ByteLevel.alphabet()\n"
        "words = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(letters))}, merges=[]))\n"
        "words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)\n"
        "PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(sys.argv[1])\n"
    )
    subprocess.run([PYTHON, "-c", code, str(folder)], check=True, env=environment())
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "vocab_size": 300,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 10000,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    rows = [{"text": f"{i:05d} is the number of this prompt", "label": str(i)} for i in range(400)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:6]))
    return folder
