"""The checkout of slime that is tested, and how programs of these tests are run in it.

`scripts/check_slime` names both: FA_ROLLOUT_SLIME_DIR, the checkout, and FA_ROLLOUT_SLIME_PYTHON, an
interpreter that has what slime's CPU tests need, Ray and sglang-router included.
"""

import os
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
