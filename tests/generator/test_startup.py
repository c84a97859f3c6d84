"""What is opened at the start, and what the user is told to change."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from fa_rollout.config import ConfigError, from_dict
from fa_rollout.generator.startup import Parts, open_parts
from shm.ring.segment import Segment
from tests.generator.hub_end import LINEAGE, ROOT, run_tree
from tests.kit.scripted import ScriptedEngine
from trainer_hook.messages import Resume

Play = Callable[..., ScriptedEngine]
USER = "tests.generator.user_code"
RESUME = Resume(incarnation=1, head=0, tail=0, sequence=0, version=0, lineage=LINEAGE, weights=None)


def open_all(tree: dict[str, Any]) -> Parts:
    """Open the parts of a configuration and close them again."""

    async def go() -> Parts:
        async with AsyncExitStack() as stack:
            segment = stack.enter_context(Segment.create(1 << 16))
            parts, _ = await open_parts(from_dict(tree), resumed, segment.fd, stack)
            return parts

    async def resumed() -> Resume:
        return RESUME

    return asyncio.run(go())


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("no such data", {"data": {"path": "/no/such/file.jsonl"}}, "/no/such/file.jsonl"),
    ("no such filter", {"rollout": {"filter": f"{USER}.no_such"}}, "rollout.filter"),
    ("no such generate", {"rollout": {"generate": f"{USER}.no_such"}}, "rollout.generate"),
    ("a plain generate", {"rollout": {"generate": f"{USER}.response_length"}}, "async def generate"),
    ("no tokenizer", {"engine": {"tokenizer": "/no/such/model"}}, "tokenizer.json"),
    ("engines' own model is not here", {"engine": {"tokenizer": None}}, "tokenizer.json"),
]


@pytest.mark.parametrize(
    ("sections", "text"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES]
)
def test_a_mistake_in_any_part_stops_the_start_and_names_what_to_change(
    tmp_path: Path, play: Play, sections: dict[str, Any], text: str
) -> None:
    engine = play()
    with pytest.raises(ConfigError, match=text):
        open_all(run_tree(tmp_path, engine.url, **sections))


def test_all_parts_are_open_when_the_start_is_done(tmp_path: Path, play: Play) -> None:
    engine = play()
    tree = run_tree(
        tmp_path, engine.url, rollout={"filter": "zero_variance", "generate": f"{USER}.by_prompt"}
    )
    parts = open_all(tree)
    assert len(parts.source) == 20
    assert parts.segment.size_bytes == 1 << 16
    assert [info.url for info in parts.pool.engines] == [engine.url]
    assert parts.group_filter is not None
    assert parts.generate is not None


def test_the_generator_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "pyarrow", "multiprocess", "rich")
    check = f"import sys, fa_rollout.generator.main; print([n for n in {heavy} if n in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
