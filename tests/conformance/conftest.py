"""Engines under test: the embedded one always, SGLang with `-m sglang`, each also behind a router."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conformance_kit import CONTEXT, MAX_RUNNING, Http, Target
from tests.engines.reference import load_reference, make_model
from tests.kit.embedded import EmbeddedEngine
from tests.kit.sglang_cpu.launch import SGLangServer

REAL = [pytest.mark.sglang, pytest.mark.timeout(600)]
TARGETS = [
    "embedded",
    pytest.param("embedded behind SGLang's router", marks=REAL),
    pytest.param("sglang", marks=REAL),
    pytest.param("sglang behind SGLang's router", marks=REAL),
]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), seed=0, context=CONTEXT)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("other"), seed=1, context=CONTEXT)


@pytest.fixture(scope="session")
def model(model_folder: Path) -> Any:
    return load_reference(model_folder)


@pytest.fixture(scope="session")
def other(other_folder: Path) -> Any:
    return load_reference(other_folder)


@pytest.fixture(scope="session")
def embedded_url(model_folder: Path) -> Iterator[str]:
    options = ["--max-running-requests", str(MAX_RUNNING)]
    with EmbeddedEngine.start(model_folder, options=options) as engine:
        yield engine.url


@pytest.fixture(scope="session")
def sglang_url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    options = ["--max-running-requests", str(MAX_RUNNING)]
    with SGLangServer.start(model_folder, log=log, options=options) as server:
        yield server.url


@pytest.fixture(scope="session", params=TARGETS)
def engine(
    request: pytest.FixtureRequest,
    model_folder: Path,
    other_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Target]:
    kind, _, router = request.param.partition(" behind ")
    engine_url: str = request.getfixturevalue(f"{kind}_url")

    def target(url: str) -> Target:
        return Target(kind=kind, url=url, engine_url=engine_url, model=model_folder, other=other_folder)

    if not router:
        yield target(engine_url)
    else:
        log = tmp_path_factory.mktemp("router") / "router.log"
        with SGLangServer.start_router([engine_url], log=log) as real:
            yield target(real.url)


@pytest.fixture
def target(engine: Target) -> Iterator[Target]:
    """Puts back what a test may have changed: weights, their label, a pause."""
    yield engine

    async def restore(http: Http) -> None:
        await http.control("/continue_generation", {})
        _, info = await http.control("/model_info")
        if info["weight_version"] != "default" or info["model_path"] != str(engine.model):
            body = {"model_path": str(engine.model), "weight_version": "default", "abort_all_requests": True}
            status, answer = await http.control("/update_weights_from_disk", body)
            assert status == 200, answer

    engine.with_http(restore)
