"""One model, its transformers reference, and one engine process for all tests of the embedded engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.reference import load_reference, make_model
from tests.kit.embedded import EmbeddedEngine

# Threads that spin for each other are slow on a machine that others use too
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return make_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> Any:
    return load_reference(model_folder)


@pytest.fixture(scope="session")
def other_reference(other_folder: Path) -> Any:
    return load_reference(other_folder)


@pytest.fixture(scope="session")
def shared_engine(model_folder: Path) -> Iterator[EmbeddedEngine]:
    """For tests that leave weights, pause and version as they are."""
    with EmbeddedEngine.start(model_folder) as engine:
        yield engine
