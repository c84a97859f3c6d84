"""The trainer's Python pays next to nothing for the hook."""

import subprocess
import sys

import pytest

HEAVY = (
    "aiohttp",
    "httpx",
    "requests",
    "transformers",
    "tokenizers",
    "pyarrow",
    "jinja2",
    "fa_rollout",
    "safetensors",
)


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_neither_hook_nor_contract_imports_torch_or_anything_heavy() -> None:
    code = f"""
import sys
from trainer_hook import *
import trainer_hook.batches.balance, trainer_hook.weights.publish
print(*(name for name in {("torch", *HEAVY)} if name in sys.modules))
"""
    assert run(code) == ""


def test_the_contract_needs_no_numpy() -> None:
    contract = "trainer_hook.messages, trainer_hook.record, trainer_hook.batches.balance"
    code = f"import sys, {contract}; print('numpy' in sys.modules)"
    assert run(code) == "False"


def test_beside_torch_the_package_alone_is_imported() -> None:
    code = """
import sys
import torch
before = set(sys.modules)
import trainer_hook
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    assert run(code) == "shm trainer_hook"


def test_every_public_name_exists_and_is_listed() -> None:
    import trainer_hook

    assert set(trainer_hook.__all__) <= set(dir(trainer_hook))
    for name in trainer_hook.__all__:
        assert getattr(trainer_hook, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'TrainerHok'"):
        _ = trainer_hook.TrainerHok
