"""Backlog, bias and memory of the real loop: bounded, none, flat."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.hub.rig import Rig
from tests.kit.scripted import Lengths, ScriptedEngine
from trainer_hook import GeneratorFailed
from trainer_hook import messages as m

Play = Callable[..., ScriptedEngine]

LONG, SHORT = 200, 20


def num_requests(engine: ScriptedEngine) -> int:
    return sum(1 for request in engine.requests("/generate") if request.rid and "-g" in request.rid)


def test_while_the_trainer_is_busy_no_more_is_begun_than_the_bound_allows(tmp_path: Path, play: Play) -> None:
    engine = play()
    with Rig(tmp_path / "run", engine, rollout={"staleness": 1}) as rig, rig.attach() as hook:
        for num_groups in (8, 12, 16):
            rig.until(lambda: num_requests(engine) >= 2 * num_groups)  # noqa: B023
            until_s = time.monotonic() + 0.5
            while time.monotonic() < until_s:
                assert num_requests(engine) == 2 * num_groups
                time.sleep(0.05)
            with hook.next_batch():
                pass
            with hook.update_weights():
                pass


def test_long_answers_are_trained_as_often_as_they_are_sampled_and_none_is_too_old(
    tmp_path: Path, play: Play
) -> None:
    lengths = Lengths(kind="list", values=[SHORT] * 3 + [LONG] + [SHORT] * 6)
    engine = play(tokens_per_s=800.0, lengths=lengths)
    num_steps = 20
    rollout = {"num_steps": num_steps, "staleness": 1}
    trained: list[int] = []
    with Rig(tmp_path / "run", engine, rollout=rollout) as rig, rig.attach() as hook:
        for step in range(num_steps):
            with hook.next_batch() as batch:
                assert batch.staleness is not None
                assert batch.staleness <= 1
                trained += [sample.response_length for sample in batch.samples]
            if step == num_steps // 2:  # not at the end alone, where all that began is trained
                assert abs(trained.count(LONG) / len(trained) - 0.1) <= 0.05
            with hook.update_weights():
                pass
    assert len(trained) == num_requests(engine) == 8 * num_steps
    assert trained.count(LONG) == len(trained) // 10


@pytest.mark.parametrize(
    "num_samples", [3_000, pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.timeout(600)])]
)
def test_memory_is_flat_over_thousands_of_samples(tmp_path: Path, play: Play, num_samples: int) -> None:
    engine = play(lengths=Lengths(tokens=8))
    num_steps = num_samples // 200
    rollout = {"num_steps": num_steps, "groups_per_step": 25, "samples_per_group": 8}
    with Rig(tmp_path / "run", engine, rollout=rollout, ring={"bytes": 4 << 20}) as rig:
        with rig.attach() as hook:
            processes = [psutil.Process(rig.process.pid), rig.generator()]
            warm = [0, 0]
            for step in range(num_steps):
                with hook.next_batch():
                    pass
                with hook.update_weights():
                    pass
                if step == num_steps // 3:
                    warm = [process.memory_info().rss for process in processes]
            grown = [p.memory_info().rss - w for p, w in zip(processes, warm, strict=True)]
        assert max(grown) < 6 << 20, grown


def test_the_smallest_limits_make_progress(tmp_path: Path, play: Play) -> None:
    rollout = {"num_steps": 4, "groups_per_step": 1, "samples_per_group": 1, "staleness": 0}
    rig = Rig(tmp_path / "run", play(), rollout=rollout)
    rig.config["engine"]["max_concurrent_samples"] = 1
    rig.config["evaluation"] = {"max_concurrent_samples": 1}
    trained = []
    (rig.folder / "prompts.jsonl").write_text('{"prompt": "the only one", "label": "x"}\n')
    with rig, rig.attach() as hook:
        pending = hook.begin_evaluation(["one", "two"])
        for _ in range(4):
            with hook.next_batch() as batch:
                trained += [(sample.group, sample.epoch) for sample in batch.samples]
            with hook.update_weights():
                pass
        assert len(pending.result().samples) == 2
    assert trained == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_data_that_changes_in_the_middle_of_a_run_ends_it_and_is_named(tmp_path: Path, play: Play) -> None:
    with Rig(tmp_path / "run", play(), rollout={"staleness": 0, "groups_per_step": 2}) as rig:
        with rig.attach() as hook:
            with hook.next_batch():
                (rig.folder / "prompts.jsonl").write_text("")
            with hook.update_weights():
                pass
            with pytest.raises(GeneratorFailed, match=r"prompts\.jsonl"), hook.next_batch():
                pass
        rig.last_words = m.RunEnded(exit_code=1, text="", counts={})
