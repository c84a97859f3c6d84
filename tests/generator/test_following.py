"""Engines whose weights another run gives: which of them get requests, and what is left to that run."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.generator.hub_end import LINEAGE, VOCAB_SIZE, HubEnd, run_tree
from tests.kit.scripted import Lengths, Recorded, ScriptedEngine
from trainer_hook import messages as m


def label(version: int) -> str:
    return f"{LINEAGE}:{version}"


@pytest.fixture(params=["0.5.23", "0.5.15"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[ScriptedEngine, ScriptedEngine]]:
    """Two, of a release that tells versions by token, or of one that does not."""
    settings: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "lengths": Lengths(tokens=12)}
    settings["weight_version"] = label(0)
    with (
        ScriptedEngine.start(protocol=request.param, **settings) as one,
        ScriptedEngine.start(protocol=request.param, **settings) as other,
    ):
        yield one, other


def tree(folder: Path, *engines: ScriptedEngine) -> dict[str, Any]:
    return run_tree(
        folder,
        engines[0].url,
        data={"shard": 1, "num_shards": 2},
        engine={"urls": [engine.url for engine in engines], "shared": True, "balance": "round_robin"},
    )


def give(engine: ScriptedEngine, found: str) -> None:
    """What the run that leads would have the engine tell; or what its new life tells."""
    body = json.dumps({"new_version": found, "abort_all_requests": False}).encode()
    request = urllib.request.Request(f"{engine.url}/update_weight_version", body, method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


def sent(engine: ScriptedEngine) -> list[Recorded]:
    return [request for request in engine.requests("/generate") if "probe" not in (request.rid or "")]


def publish(hub: HubEnd, version: int, *engines: ScriptedEngine) -> None:
    """An update as the leader makes it, which reaches these engines."""
    hub.send(m.PauseEngines(lease_s=30))
    hub.wait_for(m.EnginesPaused, version)
    for engine in engines:
        give(engine, label(version))
    hub.send(m.PublishWeights(version=version, lineage=LINEAGE, path=None))
    hub.wait_for(m.WeightsPublished, version)


def versions(hub: HubEnd, *groups: int) -> set[tuple[int, int]]:
    """Oldest and newest of these groups."""
    hub.until(lambda: {commit.group for commit in hub.all(m.Commit)} >= set(groups))
    return {(c.oldest_version, c.newest_version) for c in hub.all(m.Commit) if c.group in groups}


def num_in(pulse: m.Pulse) -> int:
    """Engines that get requests."""
    return sum(not engine.is_out for engine in pulse.engines)


def test_an_engine_that_missed_the_update_gets_no_request_until_the_leader_has_brought_it_up(
    tmp_path: Path, engines: tuple[ScriptedEngine, ScriptedEngine]
) -> None:
    one, other = engines
    with HubEnd(tree(tmp_path, one, other)) as hub:
        hub.wait_for(m.GeneratorReady)
        publish(hub, 1, one)
        hub.issue(0, 1, 2, 3)
        assert versions(hub, 0, 1, 2, 3) == {(1, 1)}
        assert not sent(other)
        give(other, label(1))
        num_before = len(hub.all(m.Pulse))
        hub.until(lambda: any(num_in(pulse) == 2 for pulse in hub.all(m.Pulse)[num_before:]))
        hub.issue(4, 5, 6, 7)
        assert versions(hub, 4, 5, 6, 7) == {(1, 1)}
        assert sent(other)
        assert not hub.all(m.Warned)


def test_an_engine_that_was_started_anew_is_found_by_its_answer_and_waits_too(
    tmp_path: Path, engines: tuple[ScriptedEngine, ScriptedEngine]
) -> None:
    one, other = engines
    with HubEnd(tree(tmp_path, one, other)) as hub:
        publish(hub, 1, one, other)
        give(other, "default")
        hub.issue(0)
        versions(hub, 0)
        num_sent = len(sent(other))
        assert num_sent
        hub.listen(0.5)
        hub.issue(1, 2, 3)
        assert versions(hub, 1, 2, 3) == {(1, 1)}
        assert len(sent(other)) == num_sent


def test_the_next_life_knows_the_label_and_leaves_the_leaders_pause_alone(
    tmp_path: Path, engines: tuple[ScriptedEngine, ScriptedEngine]
) -> None:
    one, other = engines
    with HubEnd(tree(tmp_path, one, other)) as hub:
        publish(hub, 1, one)
        hub.version = 1
        hub.restart()
        hub.wait_for(m.GeneratorReady, 2)
        hub.issue(0, 1, 2, 3)
        assert versions(hub, 0, 1, 2, 3) == {(1, 1)}
        assert not sent(other)
    for engine in engines:
        paths = {request.path for request in engine.requests() if request.method == "POST"}
        assert paths <= {"/generate", "/abort_request", "/update_weight_version"}


def test_an_update_that_came_to_nothing_keeps_out_whoever_has_something_of_it(
    tmp_path: Path, engines: tuple[ScriptedEngine, ScriptedEngine]
) -> None:
    one, other = engines
    with HubEnd(tree(tmp_path, one, other)) as hub:
        publish(hub, 1, one, other)
        hub.send(m.PauseEngines(lease_s=30))
        hub.wait_for(m.EnginesPaused, 2)
        give(other, label(2))
        hub.send(m.ContinueEngines())
        hub.until(lambda: len(other.requests("/model_info")) > 3)
        hub.listen(0.3)
        hub.issue(0, 1, 2, 3)
        assert versions(hub, 0, 1, 2, 3) == {(1, 1)}
        assert not sent(other)
