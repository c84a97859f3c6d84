"""Engines, and a model's folder, for the real slime."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.scripted import Lengths, Script, ScriptedEngine
from tests.slime.real.checkout import write_model


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
    return write_model(tmp_path_factory.mktemp("model"))
