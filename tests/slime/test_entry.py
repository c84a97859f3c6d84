"""`fa_rollout.entry` in slime's hands: whole groups, once each, true to the engine, within the bound."""

import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slime.utils.types import Sample

import fa_rollout
from fa_rollout.config import ConfigError
from fa_rollout.launcher.running import all_running
from fa_rollout.observe.observer import Observer
from fa_rollout.slime.manager import rollout
from tests.kit.scripted import Lengths, ScriptedEngine
from tests.slime.kit import CODE, Manager, arguments, assert_true_to_engine, flat, train_async, update

Engines = Callable[..., tuple[list[ScriptedEngine], str]]


def test_the_entry_is_a_function_of_the_signature_that_slime_demands() -> None:
    parameters = inspect.signature(fa_rollout.entry).parameters
    assert list(parameters) == ["args", "rollout_id", "data_source", "evaluation"]
    assert parameters["evaluation"].default is False
    assert inspect.isfunction(fa_rollout.entry)


def test_each_rollout_is_a_batch_of_whole_groups_true_to_the_engine(tmp_path: Path, engines: Engines) -> None:
    made, router = engines()
    manager = Manager(arguments(tmp_path, router))
    train_async(manager, made, steps=range(6))
    for batch in manager.batches.values():
        assert [len(group) for group in batch] == [2] * 4
        indices = [group[0].index for group in batch]
        assert indices == sorted(indices)
    assert sorted(manager.trained) == list(range(24)), "every prompt once, and none beyond the last rollout"
    for sample in manager.samples:
        assert_true_to_engine(sample)
        assert type(sample) is Sample
        assert isinstance(sample.tokens, list)
        assert isinstance(sample.loss_mask, list)
        assert sample.loss_mask == [1] * sample.response_length
        assert sample.status == Sample.Status.COMPLETED
        assert sample.reward == float(sample.response_length)
        assert len(sample.response) > 0
        assert sample.prefix_cache_info.total_prompt_tokens > 0
    assert manager.source.sample_group_index == 24, "no prompt is taken that the training does not need"


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_no_token_is_older_than_the_bound_when_its_batch_is_trained(
    tmp_path: Path, engines: Engines, staleness: int
) -> None:
    lengths = Lengths(kind="lognormal", tokens=20, high=60, seed=3)
    made, router = engines(lengths=lengths, tokens_per_s=300.0)
    args = arguments(tmp_path, router, num_rollout=10, fa_rollout_staleness=staleness)
    manager = Manager(args)
    train_async(manager, made, steps=range(10))
    ages = manager.ages
    assert max(ages) <= staleness
    assert sorted(manager.trained) == list(range(40))
    assert max(m["fa_rollout/staleness"] for m in manager.metrics.values()) == max(ages)


def test_fanned_out_groups_keep_their_shape(tmp_path: Path, engines: Engines) -> None:
    made, router = engines()
    manager = Manager(
        arguments(tmp_path, router, custom_generate_function_path=f"{CODE}.two_of_each", num_rollout=2)
    )
    train_async(manager, made, steps=range(2))
    for batch in manager.batches.values():
        for group in batch:
            assert [[s.rollout_id for s in member] for member in group] == [[s[0].index] * 2 for s in group]
            assert [s.metadata.get("part") for s in flat(group)] == [None, 2, None, 2]
            assert all(s.reward == s.response_length == len(s.rollout_log_probs) for s in flat(group))


def test_evaluation_runs_in_the_manager_while_rollouts_are_in_flight(
    tmp_path: Path, engines: Engines
) -> None:
    made, router = engines(tokens_per_s=40.0)
    manager = Manager(arguments(tmp_path, router, num_rollout=3))
    manager.source.evaluation = [[Sample(prompt="held out", index=0)]]
    seen = []

    def evaluate(step: int) -> None:
        running = made[0].state()["num_running"]
        seen.append((running, manager.evaluate(step).data["held_out"]["rewards"]))

    train_async(manager, made, steps=range(3), meanwhile=evaluate)
    assert [rewards for _, rewards in seen] == [[0.5]] * 3
    assert seen[0][0] > 0, "training rollouts were running while the evaluation was made"
    assert sorted(manager.trained) == list(range(12))


def test_another_terminal_finds_the_run_and_its_engines(tmp_path: Path, engines: Engines) -> None:
    made, router = engines(tokens_per_s=3.0)
    manager = Manager(arguments(tmp_path, router))
    update(made, 1)
    manager.generate(0)
    (running,) = [one for one in all_running() if one.pid == os.getpid()]
    observer = Observer(running)
    try:
        seen = observer.snapshot(10.0)
        while not any(engine.now.num_done >= 8 and engine.now.in_flight for engine in seen.engines):
            time.sleep(0.1)
            seen = observer.snapshot(10.0)
    finally:
        observer.close()
    assert seen.run.name == running.run
    assert seen.groups.trained == 4
    (front,) = seen.engines
    assert front.url == router
    assert front.health == "ok"
    assert seen.generator.tokens_total >= sum(sample.response_length for sample in manager.samples)
    words = [sys.executable, "-m", "fa_rollout.cli", "top", "--once", str(os.getpid())]
    top = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert top.returncode == 0, top.stderr
    assert running.run[:8] in top.stdout
    rollout.close()
    assert not [one for one in all_running() if one.pid == os.getpid()]


def test_arrays_are_an_option_and_masks_stay_lists(tmp_path: Path, engines: Engines) -> None:
    made, router = engines()
    manager = Manager(arguments(tmp_path, router, num_rollout=1, fa_rollout_arrays=True))
    train_async(manager, made, steps=range(1))
    for sample in manager.samples:
        assert (sample.tokens.dtype, sample.rollout_log_probs.dtype) == ("int64", "float32")
        assert sample.loss_mask == [1] * sample.response_length
        assert_true_to_engine(sample)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"colocate": True}, "kills the engines"),
        ({"offload_rollout": True}, "kills the engines"),
        ({"rollout_global_dataset": False}, "data source"),
        ({"fa_rollout_stalenes": 3}, "did you mean fa_rollout_staleness"),
        ({"fa_rollout_staleness_policy": "never"}, "fa_rollout_"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    manager = Manager(arguments(tmp_path, "http://127.0.0.1:9", **changes))
    with pytest.raises(ConfigError, match=text):
        manager.generate(0)
