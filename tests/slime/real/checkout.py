"""The checkout of slime that is tested, and how programs of these tests are run in it.

`scripts/check_slime` names both: FA_ROLLOUT_SLIME_DIR, the checkout, and FA_ROLLOUT_SLIME_PYTHON, an
interpreter that has what slime's CPU tests need, Ray and sglang-router included.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SLIME = os.environ.get("FA_ROLLOUT_SLIME_DIR", "")
PYTHON = os.environ.get("FA_ROLLOUT_SLIME_PYTHON", sys.executable)

needs_checkout = [
    pytest.mark.slime,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not SLIME, reason="FA_ROLLOUT_SLIME_DIR names no checkout of slime"),
]


def environment(**changes: str) -> dict[str, str]:
    """Of a program that imports slime."""
    path = os.pathsep.join([SLIME, str(HERE / "pretend"), str(ROOT)])
    fixed = {
        "PYTHONPATH": path,
        "SLIME_HOST_IP": "127.0.0.1",
        "TQDM_DISABLE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {**os.environ, **fixed, **changes}


def options(model: Path, *, batch: int, num_samples: int) -> list[str]:
    """Arguments of slime's parser that every run has."""
    return [
        *("--hf-checkpoint", str(model), "--prompt-data", str(model / "prompts.jsonl")),
        *("--input-key", "text", "--label-key", "label", "--rollout-max-response-len", "256"),
        *("--rollout-batch-size", str(batch), "--n-samples-per-prompt", str(num_samples)),
        *("--global-batch-size", str(batch * num_samples), "--advantage-estimator", "grpo"),
        *("--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1", "--num-gpus-per-node", "8"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "32768", "--sglang-server-concurrency", "8"),
        *("--custom-rm-path", "tests.slime.real.plugins.reward"),
    ]


def write_model(folder: Path) -> Path:
    """A tokenizer, a shape and some prompts, as slime reads them."""
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
