"""The embedded engine's keeper: same address over its lives, an end to them, nothing left over."""

import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fa_rollout import config
from fa_rollout.engines.tiny_model import write_tiny_model
from fa_rollout.launcher.engines.engine import EngineKeeper
from fa_rollout.launcher.engines.program import engines

MAX_RESTARTS = 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_model(folder, characters="0123456789=")


def look_until(keeper: EngineKeeper, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        keeper.look()
        time.sleep(0.01)


def keep(model: Path, log: Path, said: list[str]) -> EngineKeeper:
    tree = {
        "data": {"path": "prompts.jsonl"},
        "rollout": {"num_steps": 1, "groups_per_step": 1, "samples_per_group": 1},
        "reward": {"function": "task.reward"},
        "engine": {"model": str(model)},
    }
    (program,) = engines(config.from_dict(tree), "the-key")
    return EngineKeeper(program, start_limit_s=60.0, max_restarts=MAX_RESTARTS, log=log, say=said.append)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def keeper(model: Path, said: list[str], tmp_path: Path) -> Iterator[EngineKeeper]:
    keeper = keep(model, tmp_path / "engine.log", said)
    yield keeper
    keeper.close()


@pytest.mark.slow
def test_a_killed_engine_comes_back_on_the_same_address_and_not_for_ever(
    keeper: EngineKeeper, said: list[str]
) -> None:
    look_until(keeper, lambda: keeper.url is not None)
    url = keeper.url
    for life in range(MAX_RESTARTS):
        assert keeper.child is not None
        os.kill(keeper.child.pid, signal.SIGKILL)
        look_until(keeper, lambda: len(said) == life + 1)  # noqa: B023
        look_until(keeper, lambda: keeper.is_up)
        assert keeper.url == url
        request = urllib.request.Request(f"{url}/model_info", headers={"Authorization": "Bearer the-key"})
        with urllib.request.urlopen(request, timeout=10) as reply:
            assert reply.status == 200
    assert keeper.child is not None
    os.kill(keeper.child.pid, signal.SIGKILL)
    look_until(keeper, lambda: keeper.failure is not None)
    assert "137" in str(keeper.failure)
    assert f"{MAX_RESTARTS} restarts" in str(keeper.failure)


def test_an_engine_that_cannot_start_is_told_with_its_last_lines_and_not_tried_again(
    tmp_path: Path, said: list[str]
) -> None:
    keeper = keep(tmp_path, tmp_path / "engine.log", said)
    look_until(keeper, lambda: keeper.failure is not None)
    assert "last lines" in str(keeper.failure)
    assert said == []
    assert keeper.child is None


def test_closing_while_it_starts_leaves_no_process(keeper: EngineKeeper) -> None:
    assert keeper.child is not None
    pid = keeper.child.pid
    keeper.close()
    keeper.close()
    assert not psutil.pid_exists(pid)
