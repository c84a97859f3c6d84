"""What the pages show in Python and TOML is Python, and configuration."""

import ast
import tomllib
from typing import Any

import pytest
from doc_kit import ROOT, Block, blocks

from fa_rollout.config import Config, from_dict

SMALLEST: dict[str, dict[str, Any]] = {
    "data": {"path": "prompts.jsonl"},
    "rollout": {"num_steps": 1, "groups_per_step": 1, "samples_per_group": 1},
    "reward": {"function": "task:reward"},
    "engine": {"model": "model"},
}
"""What a part of a configuration is laid over."""


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.place)
def test_python_compiles(block: Block) -> None:
    compile(block.text, block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda block: block.place)
def test_toml_is_a_configuration_or_a_part_of_one(block: Block) -> None:
    tree = tomllib.loads(block.text)
    config = from_dict({name: SMALLEST.get(name, {}) | tree.get(name, {}) for name in SMALLEST | tree})
    assert isinstance(config, Config)


def test_shell_blocks_say_so() -> None:
    """Only what is marked as bash is tried."""
    named = {block.language for block in blocks("sh", "shell", "console")}
    assert not named
    assert {"README.md", "docs/index.md"} <= {block.page for block in blocks("bash")}
    assert (ROOT / "mkdocs.yml").is_file()
