"""Extra columns: from samples into records, by way of a whole run to the trainer's tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fa_rollout.generator.base.errors import SampleRefused
from fa_rollout.generator.records.assemble import build_record
from fa_rollout.generator.turns.extras import extended, extra_pieces
from fa_rollout.sample import Sample
from shm.errors import DescriptorRefused
from tests.generator.samples import identity, scored_sample
from tests.hub.rig import Rig
from tests.kit.scripted import Lengths, ScriptedEngine, expected_experts
from trainer_hook.record import ExtraColumn, columns_of, schema_fingerprint

Play = Callable[..., ScriptedEngine]

TEACHER = ExtraColumn(name="teacher", per="response_token")
PIXELS = ExtraColumn(name="pixels", dtype="uint8", per="item", shape=[2])


def with_extras(**extras: Any) -> Sample:
    sample = scored_sample(num_tokens=4)
    sample.extras = {name: np.asarray(value) for name, value in extras.items()}
    return sample


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (TEACHER, [0.0] * 3),
        (TEACHER, [0.0, 1.0, np.nan, 2.0]),
        (TEACHER, np.zeros((2, 2))),
        (ExtraColumn(name="teacher", dtype="float16", per="response_token"), [1e9] * 4),
        (ExtraColumn(name="teacher", dtype="int8", per="response_token"), [1, 2, 3, 300]),
        (ExtraColumn(name="teacher", dtype="int8", per="response_token"), [0.5] * 4),
        (ExtraColumn(name="teacher", per="token"), [0.0] * 4),
        (ExtraColumn(name="teacher", per="input_token"), [0.0] * 7),
        (ExtraColumn(name="teacher", per="sample", shape=[2]), [0.0] * 3),
        (ExtraColumn(name="teacher", per="item", shape=[2]), [[0.0], [1.0]]),
    ],
)
def test_an_extra_array_that_does_not_fit_its_column_is_refused_by_name(
    column: ExtraColumn, value: Any
) -> None:
    with pytest.raises(SampleRefused, match=r"^teacher: "):
        extra_pieces([with_extras(teacher=value)], [column])


def test_only_a_column_of_items_may_be_empty() -> None:
    with pytest.raises(SampleRefused, match=r"^teacher: must be there for every sample.*sample\.extras"):
        extra_pieces([with_extras()], [TEACHER])
    pieces = extra_pieces([with_extras(), with_extras(pixels=[[1, 2], [3, 4]])], [PIXELS])
    assert [piece.tolist() for piece in pieces["pixels"]] == [[], [[1, 2], [3, 4]]]
    assert pieces["cu_pixels"][0].tolist() == [0, 0, 2]


def test_rows_of_tokens_that_were_sampled_before_stay_as_they_were() -> None:
    first, second = np.zeros((5, 2), np.int32), np.ones((9, 2), np.int32)
    assert extended({}, {"routed_experts": first})["routed_experts"] is first
    joined = extended({"routed_experts": first}, {"routed_experts": second})["routed_experts"]
    assert joined[:, 0].tolist() == [0] * 5 + [1] * 4


def test_the_schema_of_a_run_tells_its_extra_columns_apart() -> None:
    schemas = [
        [],
        [TEACHER],
        [PIXELS],
        [TEACHER, PIXELS],
        [ExtraColumn(name="teacher", dtype="float16", per="response_token")],
        [ExtraColumn(name="teacher", per="token")],
        [ExtraColumn(name="teacher", per="response_token", shape=[3])],
    ]
    assert len({schema_fingerprint(columns_of(schema)) for schema in schemas}) == len(schemas)


def test_a_record_has_its_extra_columns_behind_the_others() -> None:
    samples = [with_extras(teacher=[1, 2, 3, 4]), with_extras(teacher=[5, 6, 7, 8], pixels=[[9, 9]])]
    record = build_record(samples, identity(), [1.0, 1.0], 2.0, [TEACHER, PIXELS])
    arrays = [np.zeros(field.shape, field.dtype) for field in record.fields]
    record.fill(arrays)
    names = [column.name for column in columns_of([TEACHER, PIXELS])]
    found = dict(zip(names, arrays, strict=True))
    assert names[-3:] == ["teacher", "cu_pixels", "pixels"]
    assert found["teacher"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert found["cu_pixels"].tolist() == [0, 0, 1]
    assert found["pixels"].tolist() == [[9, 9]]


COLUMNS = [
    {"name": "token_rewards", "per": "response_token"},
    {"name": "routed_experts", "per": "input_token", "dtype": "int16", "shape": [3, 2]},
    {"name": "teacher", "per": "token", "dtype": "float16"},
    {"name": "weight", "per": "sample", "dtype": "float64"},
    {"name": "pixels", "per": "item", "dtype": "uint8", "shape": [2]},
]


def test_a_trainer_gets_extra_columns_of_every_kind_as_views_and_packed(tmp_path: Path, play: Play) -> None:
    engine = play(experts=(3, 2), lengths=Lengths(kind="uniform", low=3, high=9))
    rig = Rig(
        tmp_path / "run",
        engine,
        rollout={"num_steps": 1, "generate": "tests.generator.user_code.with_arrays"},
        reward={
            "function": "tests.generator.user_code.reward_by_token",
            "key": "reward",
            "in_loop": True,
        },
    )
    rig.config["record"] = {"columns": COLUMNS}
    with rig, rig.attach() as hook, hook.next_batch() as batch:
        (micro_batch,) = batch.micro_batches()
        start = num_items = 0
        for index, sample in enumerate(micro_batch.samples):
            num_tokens, num_response = len(sample.tokens), sample.response_length
            extras = sample.extras
            assert extras["token_rewards"].tolist() == list(range(num_response))
            experts = expected_experts(num_tokens - 1, (3, 2)).astype(np.int16)
            np.testing.assert_array_equal(sample.arrays.extras["routed_experts"], experts)
            assert extras["routed_experts"].dtype is torch.int16
            assert extras["teacher"].tolist() == [0.5] * num_tokens
            assert extras["weight"].shape == ()
            assert extras["weight"].item() == sample.member + 0.25
            assert extras["pixels"].tolist() == [[7, sample.member]] * sample.member
            memory = sample.arrays.tokens
            assert np.shares_memory(sample.arrays.extras["teacher"].base, memory.base)

            end = start + num_tokens
            rewards = micro_batch.extra("token_rewards")[start:end].tolist()
            assert rewards == [0] * sample.prompt_length + list(range(num_response))
            packed = micro_batch.extra("routed_experts")[start:end]
            assert packed[:-1].tolist() == experts.tolist()
            assert not packed[-1].any()
            assert micro_batch.extra("weight")[index].item() == sample.member + 0.25
            start, num_items = end, num_items + sample.member
        assert micro_batch.extra("pixels").shape == (num_items, 2)


def test_a_reader_without_the_runs_columns_is_refused(tmp_path: Path, play: Play) -> None:
    rig = Rig(tmp_path / "run", play(), rollout={"generate": "tests.generator.user_code.with_arrays"})
    rig.config["record"] = {"columns": COLUMNS[2:]}
    with rig, rig.attach() as hook:
        hook._session.reader._schema = schema_fingerprint()
        with pytest.raises(DescriptorRefused), hook.next_batch():
            pass


def test_experts_that_no_engine_tells_fail_the_group_and_say_how_to_get_them(
    tmp_path: Path, play: Play
) -> None:
    rig = Rig(tmp_path / "run", play())
    rig.config["record"] = {"columns": [COLUMNS[1]]}
    with rig, rig.attach():
        rig.until(lambda: rig.events("failed"))
        assert "--enable-return-routed-experts" in rig.events("failed")[0]["reason"]
