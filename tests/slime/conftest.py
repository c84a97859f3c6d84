"""The stand-in for slime on the path, engines behind a router, and an end to every run."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

STANDIN = str(Path(__file__).parent / "standin")
ROOT = str(Path(__file__).parents[2])

sys.path.insert(0, STANDIN)

from fa_rollout.slime.manager import rollout  # noqa: E402
from tests.generator.hub_end import VOCAB_SIZE  # noqa: E402
from tests.kit.scripted import Lengths, Script, ScriptedEngine  # noqa: E402


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The generator finds user code and stand-in where this process does; no run outlives its test."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.syspath_prepend(STANDIN)
    yield
    rollout.close()


@pytest.fixture
def engines() -> Iterator[Callable[..., tuple[list[ScriptedEngine], str]]]:
    """Starts engines and a router before them: `engines(num, **script)` gives both."""
    started: list[ScriptedEngine] = []

    def start(num_engines: int = 1, **script: Any) -> tuple[list[ScriptedEngine], str]:
        plain = {"vocab_size": VOCAB_SIZE, "lengths": Lengths(tokens=12), "weight_version": "default"}
        made = [ScriptedEngine.start(Script(**(plain | script))) for _ in range(num_engines)]
        router = ScriptedEngine.start(Script(workers=[engine.url for engine in made], router_drops=False))
        started.extend([*made, router])
        return made, router.url

    yield start
    for engine in started:
        engine.stop()
