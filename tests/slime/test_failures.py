"""What breaks is told, or is repaired, and no group is lost: errors of user code, deaths, resumes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fa_rollout.slime.manager import rollout
from tests.generator.hub_end import VOCAB_SIZE
from tests.kit.scripted import Lengths, Rule, ScriptedEngine
from tests.slime.conftest import ROOT, STANDIN
from tests.slime.kit import (
    CODE,
    Manager,
    arguments,
    assert_true_to_engine,
    post,
    train_async,
    train_sync,
    update,
)
from trainer_hook.errors import GeneratorFailed, HubLost

Engines = Callable[..., tuple[list[ScriptedEngine], str]]


def children(module: str) -> list[psutil.Process]:
    """Processes below this one that run a module."""
    found = psutil.Process().children(recursive=True)
    return [p for p in found if module in p.cmdline()]


def test_an_exception_of_user_code_reaches_the_manager_with_its_traceback(
    tmp_path: Path, engines: Engines
) -> None:
    made, router = engines()
    manager = Manager(arguments(tmp_path, router, custom_rm_path=f"{CODE}.reward_that_raises"))
    with pytest.raises(GeneratorFailed) as caught:
        train_async(manager, made, steps=range(6))
    text = str(caught.value)
    assert "ArithmeticError: the reward of group 2 cannot be computed" in text
    assert "user_code.py" in text
    assert not children("fa_rollout.slime.generation.generator")


def test_a_reward_that_cancels_itself_has_raised(tmp_path: Path, engines: Engines) -> None:
    made, router = engines()
    manager = Manager(arguments(tmp_path, router, custom_rm_path=f"{CODE}.reward_that_cancels_itself"))
    with pytest.raises(
        GeneratorFailed, match=r"slime: CancelledError: .*user_code\.py:\d+ in reward_that_cancels_itself"
    ):
        train_async(manager, made, steps=range(6))


def test_a_function_that_never_returns_costs_its_group_alone(tmp_path: Path, engines: Engines) -> None:
    made, router = engines()
    changes = {"custom_rm_path": f"{CODE}.reward_that_never_returns", "fa_rollout_idle_timeout_s": 0.5}
    manager = Manager(arguments(tmp_path, router, fa_rollout_log_dir=str(tmp_path / "log"), **changes))
    train_async(manager, made, steps=range(6))
    assert len(set(manager.trained)) == len(manager.trained) == 24
    assert 2 not in manager.trained
    rollout.close()
    lines = (tmp_path / "log" / "events.jsonl").read_text().splitlines()
    (failed,) = [event for event in map(json.loads, lines) if event["event"] == "failed"]
    assert failed["group"] == 2
    place = r"slime: timeout: it asked no engine for 0.5 s .*user_code.py:\d+ in reward_that_never_returns"
    assert re.match(place, failed["reason"])


def test_turns_without_end_cost_their_group_alone(tmp_path: Path, engines: Engines) -> None:
    made, router = engines()
    changes = {"custom_generate_function_path": f"{CODE}.turns_without_end", "fa_rollout_stall_s": 6.0}
    manager = Manager(arguments(tmp_path, router, fa_rollout_log_dir=str(tmp_path / "log"), **changes))
    train_async(manager, made, steps=range(6))
    assert len(set(manager.trained)) == len(manager.trained) == 24
    assert 2 not in manager.trained
    rollout.close()
    lines = (tmp_path / "log" / "events.jsonl").read_text().splitlines()
    (failed,) = [event for event in map(json.loads, lines) if event["event"] == "failed"]
    assert failed["group"] == 2
    place = (
        r"slime: timeout: it took turn after turn for 4.2 s, .*trainer.stall_s\); it has been at .*:\d+ in "
    )
    assert re.match(place, failed["reason"])


def test_with_retries_an_exception_ends_the_run_only_in_the_end(tmp_path: Path, engines: Engines) -> None:
    made, router = engines()
    changes = {"custom_rm_path": f"{CODE}.reward_that_raises", "fa_rollout_on_error": "retry"}
    manager = Manager(arguments(tmp_path, router, **changes))
    with pytest.raises(GeneratorFailed, match="attempt 3 of 3"):
        train_async(manager, made, steps=range(6))


def test_a_filter_that_drops_everything_ends_the_run_and_says_what_it_dropped(
    tmp_path: Path, engines: Engines
) -> None:
    made, router = engines()
    changes = {"dynamic_sampling_filter_path": f"{CODE}.keep_none", "fa_rollout_max_rejections": 20}
    manager = Manager(arguments(tmp_path, router, **changes))
    with pytest.raises(GeneratorFailed) as caught:
        train_async(manager, made, steps=range(6))
    text = str(caught.value)
    assert "user_code.keep_none' rejected 20 groups in a row" in text
    assert "20 x zero_std" in text
    assert "fa_rollout_max_rejections" in text
    assert not children("fa_rollout.slime.generation.generator")


def test_a_killed_generator_loses_nothing(tmp_path: Path, engines: Engines) -> None:
    made, router = engines(tokens_per_s=100.0)
    manager = Manager(arguments(tmp_path, router))

    def kill(step: int) -> None:
        if step in (1, 3):
            for process in children("fa_rollout.slime.generation.generator"):
                process.kill()

    train_async(manager, made, steps=range(6), meanwhile=kill)
    assert sorted(manager.trained) == list(range(24))
    for sample in manager.samples:
        assert_true_to_engine(sample)


def test_a_generator_that_starts_in_a_pause_of_slimes_does_not_end_it(
    tmp_path: Path, engines: Engines
) -> None:
    made, router = engines(tokens_per_s=100.0)
    manager = Manager(arguments(tmp_path, router))

    def kill_in_a_pause(step: int) -> None:
        if step != 1:
            return
        post(made[0].url, "/pause_generation", {})
        (dead,) = children("fa_rollout.slime.generation.generator")
        dead.kill()
        knocked = len(made[0].requests("/generate"))
        deadline_s = time.monotonic() + 60
        while len(made[0].requests("/generate")) == knocked:
            assert time.monotonic() < deadline_s, "the next generator asks the engine for a first token"
            time.sleep(0.05)
        assert made[0].state()["pause_mode"] is not None, (
            "weights may be half there: only slime knows when they are whole"
        )
        post(made[0].url, "/continue_generation", {})

    train_async(manager, made, steps=range(6), meanwhile=kill_in_a_pause)
    assert sorted(manager.trained) == list(range(24))
    for sample in manager.samples:
        assert_true_to_engine(sample)


def test_requests_leave_before_slime_is_imported(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, router = engines()
    monkeypatch.setenv("STANDIN_IMPORT_S", "3")
    manager = Manager(arguments(tmp_path, router, num_rollout=1))
    update(made, 1)
    started_s = time.monotonic()
    manager.generate(0)
    first_s = min(r.time_s for r in made[0].requests("/generate") if r.rid and "-m" in r.rid)
    assert time.monotonic() - started_s > 3
    assert first_s - started_s < time.monotonic() - started_s - 1.5
    for sample in manager.samples:
        assert_true_to_engine(sample)


def test_an_engine_that_fails_for_a_while_costs_no_group(tmp_path: Path, engines: Engines) -> None:
    rules = [Rule(status=500, body="out of memory", skip=5, times=6), Rule(drop="middle", skip=20, times=4)]
    made, router = engines(2, rules=rules)
    manager = Manager(arguments(tmp_path, router, num_rollout=3, rollout_num_engines=2))
    train_async(manager, made, steps=range(3))
    assert sorted(manager.trained) == list(range(12))


def test_an_engine_that_was_started_anew_is_not_taken_for_current(tmp_path: Path, engines: Engines) -> None:
    # Few places, so that there is still work when the next engine is up.
    slow: dict[str, Any] = {"lengths": Lengths(tokens=30), "tokens_per_s": 50.0}
    made, router = engines(2, **slow)
    changes = {"rollout_num_engines": 2, "sglang_server_concurrency": 2}
    manager = Manager(arguments(tmp_path, router, **changes))

    def start_anew(step: int) -> None:
        if step != 2:
            return
        made[1].stop()
        port = int(made[1].url.rpartition(":")[2])
        made[1] = ScriptedEngine.start(vocab_size=VOCAB_SIZE, port=port, **slow)
        deadline_s = time.monotonic() + 60
        while not made[1].requests("/generate"):
            assert time.monotonic() < deadline_s, "the router finds it again"
            time.sleep(0.05)

    try:
        train_async(manager, made, steps=range(6), meanwhile=start_anew)
    finally:
        made[1].stop()
    assert sorted(manager.trained) == list(range(24))
    for sample in manager.samples:
        assert_true_to_engine(sample)
        assert "default" not in sample.weight_versions, "its weights are those of its start"


@pytest.mark.parametrize("generate", [None, f"{CODE}.one_turn", f"{CODE}.by_a_client_of_its_own"])
def test_nothing_that_an_engine_says_under_the_weights_of_its_start_is_trained(
    tmp_path: Path, engines: Engines, generate: str | None
) -> None:
    made, router = engines(2, lengths=Lengths(tokens=30), tokens_per_s=100.0)
    changes = {"rollout_num_engines": 2, "sglang_server_concurrency": 2, "num_rollout": 4}
    manager = Manager(arguments(tmp_path, router, custom_generate_function_path=generate, **changes))
    update(made, 1)
    manager.generate(0)
    post(made[1].url, "/update_weights_from_disk", {"model_path": "none", "weight_version": "default"})
    before = len(made[1].requests("/generate"))
    manager.generate(1)
    assert len(made[1].requests("/generate")) > before, "it was asked"
    update(made, 2)
    for step in (2, 3):
        manager.generate(step)
    assert sorted(manager.trained) == list(range(16))
    for sample in manager.samples:
        assert_true_to_engine(sample)
        assert "default" not in sample.weight_versions


@pytest.mark.parametrize("loop", [train_async, train_sync])
def test_save_and_resume_train_every_prompt_once(
    tmp_path: Path, engines: Engines, loop: Callable[..., None]
) -> None:
    made, router = engines(lengths=Lengths(kind="lognormal", tokens=20, high=60, seed=5), tokens_per_s=200.0)
    save = str(tmp_path / "checkpoint")
    first = Manager(arguments(tmp_path, router, save=save, num_rollout=10))
    loop(first, made, steps=range(10), save_after=3, stop_after=5)
    rollout.close()
    trained = [group[0].group_index for step in range(4) for group in first.batches[step]]

    second = Manager(arguments(tmp_path, router, save=save, load=save, num_rollout=10))
    second.source.load(3)
    loop(second, made, steps=range(4, 10))
    everything = trained + second.trained
    assert len(everything) == len(set(everything)) == 40
    assert set(everything) == set(range(40)), "the prompts that were under way at the checkpoint come first"


def test_a_hub_that_stands_still_is_ended_and_told_while_the_manager_waits(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fa_rollout.slime.manager.hub.SILENCE_LIMIT_S", 3.0)
    made, router = engines(tokens_per_s=1.0)
    manager = Manager(arguments(tmp_path, router))
    update(made, 1)
    below: list[psutil.Process] = []

    def freeze() -> None:
        while made[0].state()["num_running"] == 0:
            time.sleep(0.05)
        below.extend(psutil.Process().children(recursive=True))
        (hub,) = children("fa_rollout.hub")
        hub.send_signal(signal.SIGSTOP)

    freezer = threading.Thread(target=freeze)
    freezer.start()
    with pytest.raises(HubLost, match="did not answer for 3 s"):
        manager.generate(0)
    freezer.join()
    ours = [p for p in below if made[0].process.pid != p.pid]
    assert not [p for p in psutil.wait_procs(ours, timeout=10)[1] if "fa_rollout.slime" in str(p.cmdline())]


def test_hub_and_generator_end_with_the_manager_however_it_ends(tmp_path: Path, engines: Engines) -> None:
    made, router = engines(tokens_per_s=5.0)
    update(made, 1)
    code = (
        "from pathlib import Path; from tests.slime.kit import Manager, arguments\n"
        f"Manager(arguments(Path({str(tmp_path)!r}), {router!r})).generate(0)"
    )
    path = os.pathsep.join([ROOT, STANDIN])
    manager = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    below: list[psutil.Process] = []
    deadline_s = time.monotonic() + 30
    while made[0].state()["num_running"] == 0:
        assert time.monotonic() < deadline_s
        below = psutil.Process(manager.pid).children(recursive=True)
        time.sleep(0.05)
    assert len(below) >= 2
    manager.kill()
    manager.wait()
    _, alive = psutil.wait_procs(below, timeout=10)
    assert not alive
