"""Several engines of one run, under their supervisors: the rest goes on, hung ones are replaced."""

import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fa_rollout.config import Config, from_dict
from fa_rollout.launcher.engines.engines import LaunchedEngines
from tests.hub.rig import words

SERVE = [sys.executable, "-m", "tests.kit.scripted", "--config"]
ENGINE = [*SERVE, '{"port": {port}}']
ROUTER = [sys.executable, "-c"]
ROUTER += [
    """
import json, subprocess, sys
port, *urls = sys.argv[1:]
script = {"port": int(port), "workers": urls}
command = [sys.executable, "-m", "tests.kit.scripted", "--config", json.dumps(script)]
sys.exit(subprocess.call(command))
"""
]
ROUTER += ["{port}", "{urls}"]


def config(*, router: bool = False, **launch: Any) -> Config:
    return from_dict(
        {
            "data": {"path": "prompts.jsonl"},
            "rollout": {"num_steps": 1, "groups_per_step": 1, "samples_per_group": 1},
            "reward": {"function": "task.reward"},
            "engine": {"router": router},
            "launch": {"server": "sglang", "command": ENGINE, "router_command": ROUTER, "number": 2} | launch,
        }
    )


class Watched:
    """Engines, and what was said and told of them."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.said: list[str] = []
        self.changes: list[tuple[str, bool]] = []
        self.down: list[list[str]] = []
        self.engines = LaunchedEngines(
            config,
            log=lambda name: folder / name,
            say=self.said.append,
            change=lambda url, joins: self.changes.append((url, joins)),
            down=self.down.append,
        )

    def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, (self.said, self.changes)
            assert self.engines.failure is None or condition(), self.engines.failure
            self.engines.look()
            time.sleep(0.01)

    def up(self) -> list[str]:
        self.until(lambda: self.engines.urls is not None)
        assert self.engines.urls is not None
        return self.engines.urls


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    started: list[Watched] = []

    def start(**launch: Any) -> Watched:
        started.append(Watched(tmp_path, config(**launch)))
        return started[-1]

    yield start
    for watched in started:
        watched.engines.close()


def serving(url: str) -> psutil.Process:
    """The scripted engine that listens there."""
    port = int(url.rsplit(":", 1)[1])
    (found,) = [
        process
        for process in psutil.Process().children(recursive=True)
        if "fa_rollout.engines.supervisor" not in words(process) and f'{{"port": {port}}}' in words(process)
    ]
    return found


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/model_info", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def test_all_engines_come_up_each_at_its_own_address_with_a_log(
    watch: Callable[..., Watched], tmp_path: Path
) -> None:
    urls = watch().up()
    assert len(set(urls)) == 2
    assert all(map(answers, urls))
    assert {path.name for path in tmp_path.glob("*.log")} == {"engine-0.log", "engine-1.log"}


def test_an_engine_that_dies_comes_back_at_its_address(watch: Callable[..., Watched]) -> None:
    watched = watch()
    url = watched.up()[1]
    serving(url).kill()
    watched.until(lambda: watched.said)
    watched.until(lambda: answers(url))
    watched.until(lambda: len(watched.down) == 2)
    assert watched.said[0].startswith("engine 1 exited with code 1; restart 1 of 3")
    assert watched.down == [[url], []]
    assert watched.changes == []


def test_an_engine_that_hangs_is_ended_and_started_again(watch: Callable[..., Watched]) -> None:
    watched = watch(silence_limit_s=2)
    url = watched.up()[0]
    hung = serving(url)
    hung.send_signal(signal.SIGSTOP)
    watched.until(lambda: watched.said)
    watched.until(lambda: answers(url))
    assert not hung.is_running()


def test_one_without_further_lives_leaves_and_the_last_one_ends_the_run(
    watch: Callable[..., Watched],
) -> None:
    watched = watch(max_restarts=0)
    first, second = watched.up()
    serving(first).kill()
    watched.until(lambda: watched.changes)
    assert watched.changes == [(first, False)]
    assert watched.engines.failure is None
    serving(second).kill()
    watched.until(lambda: watched.engines.failure is not None)
    assert str(watched.engines.failure).count("exited with code") == 2


def test_behind_a_router_a_dead_engine_is_out_until_it_is_up_again(watch: Callable[..., Watched]) -> None:
    watched = watch(router=True)
    (router,) = watched.up()
    first = watched.engines.members[0]
    assert router != first
    serving(first).kill()
    watched.until(lambda: len(watched.changes) == 2)
    assert watched.changes == [(first, False), (first, True)]


def test_one_that_cannot_start_ends_the_run_before_it_begins(
    watch: Callable[..., Watched],
) -> None:
    watched = watch(command=[sys.executable, "-c", "print('no such model'); raise SystemExit(3)"])
    watched.until(lambda: watched.engines.failure is not None)
    assert "no such model" in str(watched.engines.failure)
    assert watched.engines.urls is None


def test_nothing_is_left_when_they_are_closed(watch: Callable[..., Watched]) -> None:
    before = set(psutil.Process().children(recursive=True))  # engines that other tests share
    watched = watch(router=True)
    watched.up()
    processes = set(psutil.Process().children(recursive=True)) - before
    assert len(processes) >= 6
    watched.engines.terminate()
    watched.engines.close()
    _, left = psutil.wait_procs(list(processes), timeout=20)
    assert not left, left
