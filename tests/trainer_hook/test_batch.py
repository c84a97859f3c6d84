"""A batch shows what is in the ring: true to its record, without a copy, and only while it may."""

import gc
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peer import Completion, Ring, batch_of, columns_of, head_of, reader_of

from shm.errors import DescriptorRefused
from trainer_hook.batches.group import open_groups
from trainer_hook.batches.leases import Leases
from trainer_hook.errors import StaleView
from trainer_hook.messages import Handout, Part
from trainer_hook.record import VersionSpan

FIRST = [
    Completion(prompt=[11, 12, 13], response=[14, 15], reward=1.0, mask=[1, 0], metadata={"turns": 2}),
    Completion(prompt=[11, 12, 13], response=[16, 17, 18, 19], reward=0.0, spans=[(3, 1), (5, 4)]),
]
SECOND = [
    Completion(prompt=[21], response=[], reward=0.5),
    Completion(prompt=[22, 23], response=[24], reward=2.0),
]


@pytest.fixture
def ring() -> Ring:
    return Ring()


def test_a_sample_shows_its_record(ring: Ring) -> None:
    batch = batch_of(ring, [ring.write(7, FIRST, attempt=2, epoch=1)], [[Part(0, 0), Part(0, 1)]])
    first, second = batch.samples
    assert first.tokens.tolist() == [11, 12, 13, 14, 15]
    assert first.tokens.dtype == torch.int32
    assert first.response_tokens.tolist() == [14, 15]
    assert (first.prompt_length, first.response_length) == (3, 2)
    assert first.logprobs.tolist() == [-0.5, -1.5]
    assert first.loss_mask.tolist() == [1, 0]
    assert second.version_spans == (VersionSpan(3, 1), VersionSpan(5, 4))
    assert second.staleness == 2
    assert (first.group, first.member, first.attempt, first.epoch, first.prompt_index) == (7, 0, 2, 1, 7)
    assert (first.prompt, first.label, first.finish_reason) == ("prompt 7", "7", "stop")
    assert first.metadata == {"row": 7, "turns": 2}
    assert (first.reward, first.group_reward_mean, first.group_reward_count) == (1.0, 0.5, 2)
    assert first.group_reward_std == pytest.approx(np.std([1, 0], ddof=1))
    assert first.advantage(eps=0) == pytest.approx(0.5 / np.std([1, 0], ddof=1))
    assert not first.is_filler


def test_an_excluded_member_has_no_advantage_and_no_number_that_could_spoil_a_loss(ring: Ring) -> None:
    nan = float("nan")
    completions = [
        Completion(prompt=[1], response=[2, 3], mask=mask, reward=reward)
        for mask, reward in (([1, 1], 1.0), ([0, 0], nan), ([0, 0], 9.0), ([1, 0], 0.0))
    ]
    figures = {"excluded": [1, 2], "reward_mean": 0.5, "reward_std": 0.5**0.5, "reward_count": 2}
    record = ring.write(0, completions, **figures)
    batch = batch_of(ring, [record], [[Part(0, member) for member in range(4)]])
    assert [sample.is_excluded for sample in batch.samples] == [False, True, True, False]
    assert [sample.reward for sample in batch.samples] == [1.0, None, 9.0, 0.0]
    (packed,) = batch.micro_batches()
    assert packed.rewards.tolist() == [1.0, 0.0, 9.0, 0.0]
    expected = [0.5**0.5, 0.0, 0.0, -(0.5**0.5)]
    assert [sample.advantage(eps=0) for sample in batch.samples] == pytest.approx(expected)
    assert packed.advantages(eps=0).tolist() == pytest.approx(expected)
    assert sum(packed.advantages().tolist()) == pytest.approx(0.0)
    assert repr(batch.samples[1]).endswith("reward=None)")


def test_a_sample_whose_engine_told_no_version_has_no_staleness(ring: Ring) -> None:
    completions = [Completion(prompt=[1], response=[2, 3], spans=[(-1, 1), (5, 2)])]
    (sample,) = batch_of(ring, [ring.write(0, completions)], [[Part(0, 0)]]).samples
    assert sample.staleness is None


def test_sample_tensors_are_views_of_the_ring(ring: Ring) -> None:
    (sample,) = batch_of(ring, [ring.write(0, FIRST)], [[Part(0, 0)]]).samples
    tokens = sample.tokens
    ring.overwrite()
    assert tokens.tolist() == np.full(5, 0xEEEEEEEE, np.uint32).view(np.int32).tolist()
    with pytest.raises(ValueError, match="read-only"):
        sample.arrays.tokens[0] = 1


def test_a_micro_batch_packs_samples_of_several_records(ring: Ring) -> None:
    records = [ring.write(0, FIRST), ring.write(1, SECOND)]
    batch = batch_of(ring, records, [[Part(1, 1), Part(0, 0), Part(1, 0)], [Part(0, 1)]])
    packed, single = batch.micro_batches()
    assert packed.tokens.tolist() == [22, 23, 24, 11, 12, 13, 14, 15, 21]
    assert packed.cu_seqlens.tolist() == [0, 3, 8, 9]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0]
    assert packed.sample_ids.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 2]
    assert packed.loss_mask.tolist() == [0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert packed.logprobs.tolist() == [0, 0, -0.5, 0, 0, 0, -0.5, -1.5, 0]
    assert packed.rewards.tolist() == [2.0, 1.0, 0.5]
    assert packed.group_reward_mean.tolist() == [1.25, 0.5, 1.25]
    assert packed.group_reward_count.tolist() == [2, 2, 2]
    assert packed.advantages(eps=0).tolist() == pytest.approx([0.5**0.5, 0.5**0.5, -(0.5**0.5)])
    assert (packed.max_seqlen, packed.num_tokens, packed.num_loss_tokens) == (5, 9, 2)
    dtypes = (packed.tokens.dtype, packed.cu_seqlens.dtype, packed.position_ids.dtype, packed.loss_mask.dtype)
    assert dtypes == (torch.int64, torch.int32, torch.int64, torch.float32)
    assert single.tokens.tolist() == [11, 12, 13, 16, 17, 18, 19]


def test_a_filler_and_stale_tokens_leave_the_loss_and_the_record_stays_as_it_is(ring: Ring) -> None:
    batch = batch_of(ring, [ring.write(0, FIRST)], [[Part(0, 0), Part(0, 1, False, 3)], [Part(0, 1, True)]])
    first, second = batch.micro_batches()
    assert first.loss_mask.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    assert second.loss_mask.tolist() == [0] * 7
    assert second.num_loss_tokens == 0
    assert second.samples[0].is_filler
    assert [sample.member for sample in batch.samples] == [0, 1]
    assert batch._groups[0].columns["loss_mask"].tolist() == [1, 0, 1, 1, 1, 1]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_packing_agrees_with_the_samples_at_any_lengths(lengths: list[list[tuple[int, int]]]) -> None:
    ring = Ring()
    records, parts = [], []
    for group, shapes in enumerate(lengths):
        completions = [
            Completion(prompt=[group] * p, response=list(range(r)), mask=[1] * r) for p, r in shapes
        ]
        records.append(ring.write(group, completions))
        parts += [Part(group, member) for member in range(len(shapes))]
    (packed,) = batch_of(ring, records, [parts]).micro_batches()
    bounds = packed.cu_seqlens.tolist()
    assert bounds[-1] == packed.num_tokens == len(packed.tokens) == len(packed.loss_mask)
    for sample, start, end in zip(packed.samples, bounds, bounds[1:], strict=False):
        first = start + sample.prompt_length
        assert packed.tokens[start:end].tolist() == sample.tokens.tolist()
        assert packed.logprobs[first:end].tolist() == sample.logprobs.tolist()
        assert packed.loss_mask[start:first].sum() == 0
        assert packed.loss_mask[first:end].tolist() == sample.loss_mask.tolist()


# --- lifetime -------------------------------------------------------------------------------------------


def test_what_touches_the_ring_raises_after_the_batch(ring: Ring) -> None:
    batch = batch_of(ring, [ring.write(0, FIRST)], [[Part(0, 0)]])
    (micro_batch,) = batch.micro_batches()
    (sample,) = batch.samples
    packed = micro_batch.tokens
    arrays = micro_batch.arrays
    batch.close()
    for use in (
        lambda: micro_batch.tokens,
        lambda: sample.tokens,
        lambda: sample.arrays,
        lambda: arrays.logprobs,
    ):
        with pytest.raises(StaleView, match="inside"):
            use()
    ring.overwrite()
    assert packed.tolist() == [11, 12, 13, 14, 15]
    assert (sample.reward, sample.prompt) == (1.0, "prompt 0")


def test_a_record_is_returned_once_its_last_view_is_gone(ring: Ring) -> None:
    leases = Leases()
    records = [ring.write(0, FIRST), ring.write(1, SECOND)]
    batch = batch_of(ring, records, [[Part(0, 0), Part(0, 1)], [Part(1, 1)]], leases=leases)
    derived = batch.samples[0].tokens[1:3].view(torch.int32).detach()
    mask = batch.samples[1].arrays.loss_mask[1:]
    assert len(batch.micro_batches()[0].tokens) == 12
    batch.close()
    assert leases.take_returned() == {4: [records[1].sequence]}
    assert leases.num_held == 1
    del derived
    gc.collect()
    assert leases.take_returned() == {}
    assert mask.tolist() == [1, 1, 1]
    del mask
    assert leases.take_returned_of(4) == [records[0].sequence]
    assert leases.num_held == 0


def test_a_record_that_came_twice_is_returned_twice(ring: Ring) -> None:
    leases = Leases()
    record = ring.write(0, FIRST)
    first = batch_of(ring, [record], [[Part(0, 0)]], leases=leases)
    kept = first.samples[0].tokens
    first.close()
    second = batch_of(ring, [record], [[Part(0, 0)]], leases=leases)
    second.close()
    assert leases.take_returned() == {4: [record.sequence]}
    del kept
    assert leases.take_returned() == {4: [record.sequence]}


def test_a_copied_batch_outlives_the_ring_and_may_be_written(ring: Ring) -> None:
    leases = Leases()
    record = ring.write(0, FIRST)
    batch = batch_of(ring, [record], [[Part(0, 0)]], copy=True, leases=leases)
    batch.close()
    assert leases.take_returned() == {4: [record.sequence]}
    ring.overwrite()
    (sample,) = batch.samples
    sample.tokens[0] = 5
    assert sample.tokens.tolist() == [5, 12, 13, 14, 15]
    assert batch.micro_batches()[0].tokens.tolist() == [5, 12, 13, 14, 15]


def test_only_views_of_the_ring_are_made_private(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr("trainer_hook.batches.leases.make_private", lambda address, _: made.append(address))
    leases = Leases()
    copied = batch_of(ring, [ring.write(0, FIRST)], [[Part(0, 0)]], copy=True, leases=leases)
    viewed = batch_of(ring, [ring.write(1, FIRST)], [[Part(0, 0)]], leases=leases)
    kept = [copied.samples[0].tokens, viewed.samples[0].tokens]
    for batch in (copied, viewed):
        batch.close()
    leases.keep_views()
    assert len(made) == 1
    assert 0 < kept[1].data_ptr() - made[0] < 4096


WRITE_INTO_RING = """
import os, sys
sys.path.insert(0, sys.argv[1])
from test_batch import *
from trainer_hook.session.process import name_crashes

name_crashes()
ring = Ring()
(sample,) = batch_of(ring, [ring.write(0, FIRST)], [[Part(0, 0)]]).samples
sample.tokens.add_(1)
"""


def test_a_write_into_the_ring_ends_the_process_and_names_its_line() -> None:
    here = __file__.rpartition("/")[0]
    done = subprocess.run(
        [sys.executable, "-c", WRITE_INTO_RING, here], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -11
    last_line = WRITE_INTO_RING.count("\n")
    assert f'File "<string>", line {last_line} in <module>' in done.stderr


# --- records that are not what they should be -------------------------------------------------------------


def test_a_record_of_another_schema_is_refused(ring: Ring) -> None:
    record = ring.write_raw(b"no head", list(columns_of(FIRST).values()))
    with pytest.raises(DescriptorRefused, match="head must follow"):
        batch_of(ring, [record], [[Part(0, 0)]])


@pytest.mark.parametrize("short", ["tokens", "logprobs", "loss_mask", "span_ends", "rewards", "cu_spans"])
def test_a_record_whose_columns_disagree_is_refused(ring: Ring, short: str) -> None:
    columns = columns_of(FIRST)
    columns[short] = columns[short][:-1]
    record = ring.write_raw(msgspec.msgpack.encode(head_of(0, FIRST)), list(columns.values()))
    with pytest.raises(DescriptorRefused, match="columns must agree"):
        batch_of(ring, [record], [[Part(0, 0)]])


def test_no_record_of_a_batch_is_mapped_when_one_is_refused(ring: Ring) -> None:
    good, bad = ring.write(0, FIRST), ring.write(1, SECOND)
    with pytest.raises(DescriptorRefused):
        open_groups(reader_of(ring), [good, Handout(incarnation=9, **_rest(bad))], copy=False)
    ring.overwrite()


def _rest(record: Handout) -> dict[str, int]:
    return {"sequence": record.sequence, "position": record.position, "length": record.length}
