"""How a generator ends: in order, at once, with its parent, or because the user has to change something."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.generator.hub_end import ROOT, HubEnd, run_tree
from tests.kit.scripted import Lengths, ScriptedEngine
from trainer_hook import messages as m

Play = Callable[..., ScriptedEngine]
USER = "tests.generator.user_code"
SLOWLY: dict[str, Any] = {"tokens_per_s": 5.0, "lengths": Lengths(tokens=1000)}


def under_way(hub: HubEnd, engine: ScriptedEngine, num_groups: int = 3) -> None:
    """Groups of two samples that run for many seconds."""
    hub.wait_for(m.GeneratorReady)
    engine.clear()
    hub.issue(*range(num_groups))
    hub.until(lambda: engine.state()["num_running"] == 2 * num_groups)


def assert_all_given_back(hub: HubEnd, num_groups: int = 3) -> None:
    settled = hub.all(m.Settled)
    assert sorted(s.group for s in settled) == list(range(num_groups))
    assert {s.outcome for s in settled} == {m.Settlement.RETURNED}


@pytest.mark.parametrize("by", ["Stop", "SIGTERM"])
def test_a_drain_aborts_our_requests_gives_every_group_back_and_ends_with_0(
    tmp_path: Path, play: Play, by: str
) -> None:
    engine = play(**SLOWLY)
    tree = run_tree(tmp_path, engine.url, engine={"max_concurrent_samples": 4})
    with HubEnd(tree) as hub:
        hub.wait_for(m.GeneratorReady)
        engine.clear()
        hub.issue(0, 1, 2)
        hub.until(lambda: engine.state()["num_running"] == 4)
        if by == "Stop":
            hub.send(m.Stop(grace_s=3.0, reason="the run is complete"))
        else:
            hub.process.terminate()
        assert hub.exit_code(5) == 0
        assert_all_given_back(hub)
    assert engine.state()["num_running"] == 0
    assert len(engine.requests("/generate")) == 4
    assert {r.rid for r in engine.requests("/abort_request")} == {r.rid for r in engine.requests("/generate")}


def test_a_second_sigterm_ends_at_once(tmp_path: Path, play: Play) -> None:
    engine = play()
    with HubEnd(run_tree(tmp_path, engine.url, run={"grace_s": 60.0})) as hub:
        under_way(hub, play(**SLOWLY))
        os.kill(engine.process.pid, signal.SIGSTOP)
        try:
            hub.process.terminate()
            time.sleep(0.5)
            assert hub.process.poll() is None
            hub.process.terminate()
            assert hub.exit_code(2) == 143
        finally:
            os.kill(engine.process.pid, signal.SIGCONT)


def test_a_drain_ends_within_its_grace_although_the_engine_is_silent(tmp_path: Path, play: Play) -> None:
    engine = play()
    with HubEnd(run_tree(tmp_path, engine.url, run={"grace_s": 2.0})) as hub:
        under_way(hub, play(**SLOWLY))
        os.kill(engine.process.pid, signal.SIGSTOP)
        try:
            hub.process.terminate()
            assert hub.exit_code(3) == 0
            assert_all_given_back(hub)
        finally:
            os.kill(engine.process.pid, signal.SIGCONT)


def test_a_reward_that_hangs_does_not_hold_the_end_up_and_its_workers_end_too(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    monkeypatch.setenv("TEST_PIDS", str(pids))
    engine = play()
    reward = {"function": f"{USER}.never_ends", "in_loop": False, "timeout_s": 600.0}
    with HubEnd(run_tree(tmp_path, engine.url, reward=reward)) as hub:
        hub.issue(0, 1, 2)
        hub.until(lambda: len(list(pids.iterdir())) == 2)
        hub.send(m.Stop(grace_s=3.0, reason="enough"))
        assert hub.exit_code(5) == 0
        assert_all_given_back(hub)
        workers = [int(path.name) for path in pids.iterdir()]
        hub_gone = time.monotonic() + 5
        while any(_lives(pid) for pid in workers):
            assert time.monotonic() < hub_gone, "the reward's workers must end with the generator"
            time.sleep(0.05)


def test_ctrl_c_is_the_launchers_to_act_on(tmp_path: Path, play: Play) -> None:
    engine = play()
    with HubEnd(run_tree(tmp_path, engine.url)) as hub:
        hub.wait_for(m.GeneratorReady)
        hub.process.send_signal(signal.SIGINT)
        hub.issue(0)
        hub.wait_for(m.Commit)


@pytest.mark.parametrize("by", ["Stop", "SIGTERM"])
def test_an_end_that_comes_while_parts_are_opened_is_not_lost(tmp_path: Path, by: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tree = run_tree(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
        with HubEnd(tree) as hub:
            with silent.accept()[0]:  # the generator asks the engine who it is, and gets no answer
                if by == "Stop":
                    hub.send(m.Stop(grace_s=3.0, reason="changed my mind"))
                else:
                    hub.process.terminate()
                assert hub.exit_code(5) == 0
            assert not hub.all(m.GeneratorReady)


def test_a_stop_right_behind_the_start_is_not_lost(tmp_path: Path, play: Play) -> None:
    engine = play()
    with HubEnd(run_tree(tmp_path, engine.url)) as hub:
        hub.send(m.Stop(grace_s=3.0, reason="at once"))
        assert hub.exit_code(5) == 0


def test_the_end_of_the_channel_ends_the_generator_and_its_requests(tmp_path: Path, play: Play) -> None:
    engine = play()
    with HubEnd(run_tree(tmp_path, engine.url)) as hub:
        under_way(hub, play(**SLOWLY))
        hub.channel.close()
        assert hub.process.wait(3) == 1
    assert engine.state()["num_running"] == 0


PARENT = """
import sys, time
from pathlib import Path
from tests.generator.hub_end import HubEnd, run_tree
from trainer_hook import messages as m
hub = HubEnd(run_tree(Path(sys.argv[1]), sys.argv[2]))
hub.wait_for(m.GeneratorReady)
hub.issue(0, 1)
print(hub.process.pid, flush=True)
time.sleep(600)
"""


def test_the_generator_ends_within_two_seconds_of_its_parents_sigkill(tmp_path: Path, play: Play) -> None:
    engine = play()
    command = [sys.executable, "-c", PARENT, str(tmp_path), engine.url]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=environment) as parent:
        assert parent.stdout is not None
        play(**SLOWLY)
        generator = psutil.Process(int(parent.stdout.readline()))
        deadline_s = time.monotonic() + 5
        while engine.state()["num_running"] < 4:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        parent.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        generator.wait(3)
    assert engine.state()["num_running"] == 0


@pytest.mark.parametrize(
    ("sections", "error", "text"),
    [
        ({"reward": {"function": f"{USER}.no_such_reward"}}, "ConfigError", "no_such_reward"),
        ({"rollout": {"groups_a_step": 4}}, "ConfigError", "groups_a_step"),
        ({"engine": {"urls": ["http://"]}}, "AddressError", "host:port"),
    ],
    ids=["reward", "key", "address"],
)
def test_what_the_user_has_to_change_is_told_without_a_traceback(
    tmp_path: Path, play: Play, sections: dict[str, Any], error: str, text: str
) -> None:
    engine = play()
    with HubEnd(run_tree(tmp_path, engine.url, **sections)) as hub:
        assert hub.exit_code(10) == 3
        (gave_up,) = hub.all(m.GaveUp)
    assert gave_up.error == error
    assert text in gave_up.text
    assert "Traceback" not in gave_up.text


def test_a_filter_that_rejects_everything_ends_the_run_and_names_reasons(tmp_path: Path, play: Play) -> None:
    engine = play()
    rollout = {"filter": "zero_variance", "max_rejections": 5}
    with HubEnd(run_tree(tmp_path, engine.url, rollout=rollout)) as hub:
        hub.issue(*range(10))
        assert hub.exit_code(10) == 3
        (gave_up,) = hub.all(m.GaveUp)
        settled = hub.all(m.Settled)
    assert gave_up.error == "EndlessRejection"
    assert "'zero_variance'" in gave_up.text
    assert "5 x all rewards are 12" in gave_up.text
    assert {s.outcome for s in settled} == {m.Settlement.FILTERED}
    assert settled[0].mean_response_len == 12


def test_a_users_filter_passes_some_groups_and_its_mistakes_fail_one(tmp_path: Path, play: Play) -> None:
    engine = play()
    rollout = {"filter": f"{USER}.every_third", "max_rejections": 5}
    with HubEnd(run_tree(tmp_path, engine.url, rollout=rollout)) as hub:
        hub.issue(*range(17))
        answers = hub.answers(17)
    outcomes = {g: getattr(answer, "outcome", None) for g, answer in answers.items()}
    assert [g for g, outcome in outcomes.items() if outcome is None] == list(range(0, 16, 3))
    assert outcomes[16] is m.Settlement.FAILED
    assert answers[16].reason.startswith("filter: ")  # type: ignore[union-attr]
    assert all(outcomes[g] is m.Settlement.FILTERED for g in range(16) if g % 3)


def _lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
