"""The metrics process on a real run: what it tells is what was trained, and its death is nobody's."""

import importlib.util
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse_plain
from tensorboardX.proto.event_pb2 import Event

from fa_rollout.config import from_dict
from fa_rollout.launcher.children.exporter import MAX_RESTARTS, ExporterProcess
from fa_rollout.preflight import check_metrics
from tests.hub.rig import Rig
from tests.observe.watching import MakeRig, train

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def exporter(run: Rig, said: list[str] | None = None, **metrics: Any) -> Iterator[ExporterProcess]:
    """A metrics process as the launcher starts it."""
    tree = run.config | {"metrics": {"interval_s": 0.2} | metrics}
    names = ("ADDRESS", "RUN", "TOKEN")
    environment = {f"FA_ROLLOUT_{name}": run.environment[f"FA_ROLLOUT_{name}"] for name in names}
    say = print if said is None else said.append
    with closing(
        ExporterProcess(from_dict(tree), environment, log=run.folder / "metrics.log", say=say)
    ) as process:
        yield process


def scrape(port: int, accept: str = OPEN_METRICS) -> dict[str, float]:
    """Samples without labels by name, and those with them as name{value,...}."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            text = response.read().decode()
    except OSError:
        return {}
    parse = text_string_to_metric_families if accept == OPEN_METRICS else parse_plain
    for family in parse(text):
        assert family.type != "unknown"
        assert family.documentation, family.name
        is_summary = any("quantile" in sample.labels for sample in family.samples)
        assert is_summary is (family.type == "summary" and bool(family.samples))
    return {
        sample.name + ("{" + ",".join(sample.labels.values()) + "}" if sample.labels else ""): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def events(folder: Path) -> dict[str, dict[int, float]]:
    """TensorBoard's scalars: by name, by step."""
    found: dict[str, dict[int, float]] = {}
    for path in folder.iterdir():
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
            data = data[16 + length :]
    return found


def test_what_is_exported_is_what_was_trained(rig: MakeRig, tmp_path: Path) -> None:
    port, board = free_port(), tmp_path / "board"
    with rig() as run:
        with exporter(run, prometheus_port=port, tensorboard_dir=str(board)) as process:
            with run.attach() as hook:
                train(hook, 3)
                run.until(lambda: scrape(port).get("fa_rollout_steps_total") == 3)
                figures = scrape(port)
                assert figures["fa_rollout_groups_ended_total{trained}"] == 12
                assert figures["fa_rollout_weight_version"] == 3
                assert figures["fa_rollout_staleness_bound_versions"] == 2
                assert figures[f"fa_rollout_engine_up{{{run.engine.url}}}"] == 1
                assert figures["fa_rollout_ring_size_bytes"] == 1 << 20
                plain = scrape(port, "text/plain")
                assert plain["fa_rollout_steps_total"] == 3
            run.stop()
            run.until(lambda: process.child.exit_code is not None)
            assert process.child.exit_code == 0, (run.folder / "metrics.log").read_text()
        written = events(board)
        assert set(written["step/reward_mean"]) == {0, 1, 2}
        assert written["fa_rollout/groups_ended/trained"][3] == 12
        assert all(reward > 0 for reward in written["step/reward_mean"].values())


def test_the_page_is_for_this_machine_alone(rig: MakeRig) -> None:
    port = free_port()
    with rig() as run, exporter(run, prometheus_port=port):
        run.until(lambda: scrape(port))
        others = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
                  if line.split()[3] == "0A"]  # fmt: skip
        listening = [address for address in others if address.endswith(f":{port:04X}")]
        assert listening == [f"0100007F:{port:04X}"]


def test_its_death_is_repaired_some_times_and_never_the_runs(rig: MakeRig) -> None:
    said: list[str] = []
    with rig() as run, run.attach() as hook, exporter(run, said, prometheus_port=free_port()) as process:
        for number in range(1, MAX_RESTARTS + 2):
            dead = process.child
            os.kill(dead.pid, signal.SIGKILL)
            run.until(lambda: (process.look(), len(said) == number)[1])  # noqa: B023
            if number <= MAX_RESTARTS:
                run.until(lambda: (process.look(), process.child is not dead)[1])  # noqa: B023
        assert said[0] == f"the metrics process exited with code 137; restart 1 of {MAX_RESTARTS}"
        assert said[-1].endswith("the run continues without it")
        train(hook, 2)
        process.look()
        assert len(said) == MAX_RESTARTS + 1


def test_it_ends_with_a_hub_that_was_killed(rig: MakeRig) -> None:
    port = free_port()
    with rig() as run, exporter(run, prometheus_port=port) as process:
        run.until(lambda: scrape(port))
        run.process.kill()
        run.process.wait(10)
        deadline_s = time.monotonic() + 20
        while process.child.exit_code is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        assert process.child.exit_code == 0


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_weights_and_biases_keeps_a_run_offline(
    rig: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with rig() as run, exporter(run, wandb_project="test", wandb_name="one") as process:
        with run.attach() as hook:
            train(hook, 2)
        run.stop()
        run.until(lambda: process.child.exit_code is not None, timeout_s=60)
        assert process.child.exit_code == 0, (run.folder / "metrics.log").read_text()
        assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_what_cannot_work_is_told_before_the_start() -> None:
    tree = {
        "data": {"path": "x"},
        "rollout": {"num_steps": 1, "groups_per_step": 1, "samples_per_group": 1},
        "reward": {"function": "a:b"},
        "engine": {"urls": ["http://127.0.0.1:1"]},
    }
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (finding,) = check_metrics(from_dict(tree | {"metrics": {"prometheus_port": port}}).metrics)
        assert f"metrics.prometheus_port must be free on 127.0.0.1, found {port}" in finding.text
    assert check_metrics(from_dict(tree | {"metrics": {"prometheus_port": free_port()}}).metrics) == []
    if importlib.util.find_spec("wandb") is None:
        (finding,) = check_metrics(from_dict(tree | {"metrics": {"wandb_project": "p"}}).metrics)
        assert "pip install 'fa-rollout[wandb]'" in finding.fix
