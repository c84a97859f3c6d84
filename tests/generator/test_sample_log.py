"""The sample log: bounded, never in the way, readable after a kill, one warning on a full disk."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fa_rollout.config import ConfigError, Run, from_dict
from fa_rollout.generator.records import sample_log
from fa_rollout.generator.records.sample_log import SampleLog
from fa_rollout.generator.turns.job import GroupEnding, Job
from fa_rollout.records.sample_file import COMMITTED, Span, WrittenGroup, files_of, read
from fa_rollout.sample import FinishReason, Sample
from trainer_hook.messages import Assignment, Settlement
from trainer_hook.record import VersionSpan


def job(group: int, label: Any = "4") -> Job:
    made = Job(assignment=Assignment(group, 0, 0, group))
    made.prompt_ids, made.label = np.arange(3, dtype=np.int32), label
    return made


def sample(owner: Job, member: int = 0, num_tokens: int = 5, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "prompt_ids": owner.prompt_ids,
        "response_ids": np.arange(num_tokens, dtype=np.int32) + member,
        "logprobs": np.zeros(num_tokens, np.float32),
        "loss_mask": np.ones(num_tokens, np.uint8),
        "version_spans": [VersionSpan(3, num_tokens)],
        "finish_reason": FinishReason.STOP,
        "reward": 0.5,
    }
    identity = owner.assignment
    return Sample(
        group=identity.group,
        member=member,
        attempt=0,
        epoch=0,
        prompt_index=identity.prompt_index,
        prompt="p",
        label=owner.label,
        metadata={},
        **(values | changes),
    )


def opened(folder: Path, warnings: list[str] | None = None, *, samples: Any = 1 << 20) -> SampleLog:
    told = [] if warnings is None else warnings
    run = Run(output_dir=str(folder), samples=samples)
    return SampleLog(run, name="run", incarnation=1, warn=told.append)


def everything(folder: Path) -> list[WrittenGroup]:
    return [group for path in files_of(folder).values() for group in read(path)]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    log = opened(tmp_path)
    owner = job(7)
    mask = np.array([1, 0, 1, 1, 1], np.uint8)
    log.write(owner, COMMITTED, [sample(owner), sample(owner, 1, loss_mask=mask, reward_parts={"a": 1.0})])
    log.close()
    (group,) = everything(tmp_path)
    assert (group.group, group.outcome, group.label) == (7, COMMITTED, "4")
    assert np.frombuffer(group.response_ids, "<i4").tolist() == [0, 1, 2, 3, 4, 1, 2, 3, 4, 5]
    assert group.response_lens == [5, 5]
    assert group.loss_mask == b"\1" * 5 + mask.tobytes()
    assert group.version_spans == [[Span(version=3, end=5)]] * 2
    assert group.reward_parts == [{}, {"a": 1.0}]
    assert np.frombuffer(group.prompt_ids, "<i4").tolist() == [0, 1, 2]
    assert group.own_prompt_ids == []


@pytest.mark.parametrize("damage", [{"response_ids": None}, {"loss_mask": "no"}, {"prompt_ids": object()}])
def test_a_sample_that_user_code_broke_costs_only_itself(tmp_path: Path, damage: dict[str, Any]) -> None:
    log = opened(tmp_path)
    owner = job(1)
    broken = (sample(owner, **damage),)
    log.ended(owner, GroupEnding(outcome=Settlement.FAILED, reason="refused", samples=broken))
    log.write(job(2), COMMITTED, [sample(job(2))])
    log.close()
    first, second = everything(tmp_path)
    assert (first.group, first.outcome, first.members) == (1, "failed", [])
    assert first.reason.startswith("refused; its samples cannot be kept")
    assert second.group == 2


def test_a_sample_of_other_types_hides_nothing_but_itself(tmp_path: Path) -> None:
    log = opened(tmp_path)
    owner = job(1)
    broken = (sample(owner, reward="high"), sample(owner, version_spans=[5]), sample(owner, version_spans=5))
    log.ended(owner, GroupEnding(outcome=Settlement.FAILED, reason="refused", samples=broken))
    log.write(job(2), COMMITTED, [sample(job(2))])
    log.close()
    assert [group.group for group in everything(tmp_path)] == [2]


def test_a_disk_that_hangs_is_one_warning_and_costs_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_log, "MAX_BUFFERED_BYTES", 10_000)
    warnings: list[str] = []
    log = opened(tmp_path, warnings)
    for index in range(50):
        owner = job(index)
        log.write(owner, COMMITTED, [sample(owner, num_tokens=500)])
    log.close()
    assert len(warnings) == 1
    assert "leaves groups out" in warnings[0]
    kept = [group.group for group in everything(tmp_path)]
    assert kept == list(range(len(kept)))
    assert 0 < len(kept) < 10


def test_a_group_that_is_given_back_is_not_noted(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.ended(job(1), GroupEnding(outcome=Settlement.RETURNED, reason="stopping"))
    log.ended(job(2), GroupEnding(outcome=Settlement.DROPPED, reason="too old"))
    log.close()
    assert [(g.group, g.outcome, g.reason) for g in everything(tmp_path)] == [(2, "dropped", "too old")]


def test_labels_of_any_kind_are_kept_and_long_ones_cut(tmp_path: Path) -> None:
    log = opened(tmp_path)
    labels: list[Any] = [None, 3, {"tests": [1, 2]}, np.float32(0.5), object(), "x" * 10_000]
    for index, label in enumerate(labels):
        log.write(job(index, label), COMMITTED)
    log.close()
    found = [group.label for group in everything(tmp_path)]
    assert found[:4] == [None, 3, {"tests": [1, 2]}, 0.5]
    assert found[4].startswith("<object")
    assert len(found[5]) == sample_log.MAX_LABEL_BYTES


def test_the_oldest_go_when_the_bound_is_reached(tmp_path: Path) -> None:
    limit = 64 << 10
    log = opened(tmp_path, samples=limit)
    for index in range(200):
        owner = job(index)
        log.write(owner, COMMITTED, [sample(owner, num_tokens=500)])
        log._files.append(log._frames.take())
    log.close()
    assert sum(path.stat().st_size for path in files_of(tmp_path).values()) <= limit
    kept = [group.group for group in everything(tmp_path)]
    assert kept == list(range(kept[0], 200))
    assert 10 < len(kept) < 200


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_one_warning_and_the_log_ends(tmp_path: Path) -> None:
    warnings: list[str] = []
    full = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115

    async def work() -> None:
        log = opened(tmp_path, warnings)
        log.write(job(0), COMMITTED)
        log._files.append(log._frames.take())
        log._files.close()
        log._files._file = full
        serving = asyncio.create_task(log.run())
        log.write(job(1), COMMITTED)
        await asyncio.wait_for(serving, 30)
        log.write(job(2), COMMITTED)
        log.close()

    asyncio.run(work())
    assert full.closed
    assert len(warnings) == 1
    assert "the sample log ends here" in warnings[0]
    assert [group.group for group in everything(tmp_path)] == [0]


def test_a_log_that_is_off_leaves_nothing(tmp_path: Path) -> None:
    log = opened(tmp_path, samples="off")
    log.write(job(0), COMMITTED)
    log.close()
    SampleLog(Run(), name="run", incarnation=1, warn=print).write(job(0), COMMITTED)
    assert list(tmp_path.iterdir()) == []


def test_the_bound_is_a_size_or_off() -> None:
    plain: dict[str, Any] = {
        "data": {"path": "x"},
        "rollout": {"num_steps": 1, "groups_per_step": 1, "samples_per_group": 1},
        "reward": {"function": "a.b"},
        "engine": {"model": "m"},
    }
    assert from_dict(plain | {"run": {"samples": "2GiB"}}).run.samples == 2 << 30
    assert from_dict(plain | {"run": {"samples": "off"}}).run.samples == "off"
    with pytest.raises(ConfigError, match=r"run\.samples"):
        from_dict(plain | {"run": {"samples": "none"}})
