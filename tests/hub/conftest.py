from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hub.rig import VOCAB_SIZE, Rig
from tests.kit.scripted import Lengths, Script, ScriptedEngine


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    script = Script(
        vocab_size=VOCAB_SIZE, lengths=Lengths(kind="uniform", low=4, high=40), tokens_per_s=400.0
    )
    with ScriptedEngine.start(script) as engine:
        yield engine


@pytest.fixture
def rig(tmp_path: Path, engine: ScriptedEngine) -> Callable[..., Rig]:
    """Make a run with changed sections of the configuration."""
    return lambda **changes: Rig(tmp_path / "run", engine, **changes)
