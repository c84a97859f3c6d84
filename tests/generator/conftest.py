"""One scripted engine for all tests of a module; each test says what it plays."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from tests.client.client_kit import as_started
from tests.generator.hub_end import VOCAB_SIZE
from tests.kit.scripted import Lengths, Script, ScriptedEngine

NUM_TOKENS = 12

_PLAIN = Script(vocab_size=VOCAB_SIZE, lengths=Lengths(tokens=NUM_TOKENS))


@pytest.fixture(scope="module")
def _engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine.start(_PLAIN) as engine:
        yield engine


@pytest.fixture
def play(_engine: ScriptedEngine) -> Callable[..., ScriptedEngine]:
    """Have the engine play this script from now on; all that is not named is as at its start."""

    def configure(**settings: Any) -> ScriptedEngine:
        plain = msgspec.to_builtins(_PLAIN)
        _engine.configure(**(plain | {name: msgspec.to_builtins(value) for name, value in settings.items()}))
        _engine.clear()
        return _engine

    as_started(_engine)
    return configure
