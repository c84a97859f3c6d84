"""The plug-in's pure parts: versions by slime's order of calls, prompts, checkpoints, options, wire."""

import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from slime.rollout.data_source import DataSource
from slime.utils.types import Sample

from fa_rollout.config import ConfigError, from_dict
from fa_rollout.slime import wire
from fa_rollout.slime.arguments import config_tree, num_rollouts, shows_samples
from fa_rollout.slime.manager import prompt_checkpoint
from fa_rollout.slime.manager.prompt_checkpoint import PromptCheckpoint
from fa_rollout.slime.manager.prompts import Prompts, Stock
from fa_rollout.slime.manager.versions import VersionClock
from fa_rollout.slime.options import Options, read_options
from tests.slime.kit import arguments


@pytest.mark.parametrize(
    ("first", "interval", "trained", "held"),
    [
        (0, 1, [1, 2, 3, 4, 5], [1, 1, 2, 3, 4]),
        (0, 2, [1, 1, 2, 2, 3], [1, 1, 1, 2, 2]),
        (7, 1, [1, 2, 3, 4, 5], [1, 1, 2, 3, 4]),
        (3, 2, [1, 2, 2, 3, 3], [1, 1, 2, 2, 3]),
    ],
)
def test_versions_follow_slimes_order_of_calls(
    first: int, interval: int, trained: list[int], held: list[int]
) -> None:
    version, held_now, of_call, of_training = 1, 1, [], []
    of_call.append(held_now)  # the first call, before any step
    for step in range(first, first + 5):
        of_call.append(version)  # the call for step + 1, before this step is trained
        of_training.append(version)
        version += (step + 1) % interval == 0
    assert (of_training, of_call[:5]) == (trained, held)
    clock = VersionClock(first_step=first, interval=interval)
    assert [clock.trained_by(first + i) for i in range(5)] == trained
    assert [clock.held_at(first + i) for i in range(5)] == held


def test_the_clock_is_set_by_engines_that_are_ahead() -> None:
    clock = VersionClock(first_step=0, interval=1)
    assert not clock.saw(3, step=2)
    assert clock.saw(5, step=2)
    assert (clock.trained_by(2), clock.held_at(3)) == (5, 5)


def source(tmp_path: Path, **changes: Any) -> DataSource:
    return DataSource(arguments(tmp_path, "http://127.0.0.1:9", **changes))


def test_prompts_are_kept_until_they_are_settled_and_given_first_after_a_restart(tmp_path: Path) -> None:
    prompts = Prompts(source(tmp_path), encode_ids=lambda group: [1, 2])
    payloads = prompts.take(3)
    ids, pickled = wire.decode_prompt(payloads[1])
    assert ids.tolist() == [1, 2]
    assert [s.group_index for s in pickle.loads(pickled)] == [1, 1]
    prompts.settle(0)
    again = Prompts(source(tmp_path), encode_ids=lambda group: [], first=prompts.outstanding())
    groups = [pickle.loads(wire.decode_prompt(payload)[1])[0].group_index for payload in again.take(3)]
    assert groups == [1, 2, 0], "then the data source goes on, here a new one from its start"


def test_the_stock_grows_with_rejections_and_shrinks_again() -> None:
    stock = Stock(least=4)
    assert stock.size == 4
    for _ in range(10):
        stock.rejected()
    assert stock.size == 20
    for _ in range(4):
        stock.next_call()
    assert stock.size == 4


def write(
    folder: Path, rollout_id: int, position: int, delivered: list[bytes], outstanding: list[bytes]
) -> None:
    place = (0, position, 2 * position, position)
    prompt_checkpoint.write(
        str(folder),
        rollout_id,
        PromptCheckpoint(position=place, delivered=delivered, outstanding=outstanding, lineage="ab"),
    )


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        pytest.param(12, [b"of 4", b"left by 4"], id="saved after the next call, as train_async does"),
        pytest.param(8, [b"left by 3"], id="saved before the next call, as train.py does"),
        pytest.param(10, [], id="of another run"),
    ],
)
def test_a_resume_gives_what_was_under_way_at_the_checkpoint(
    tmp_path: Path, position: int, expected: list[bytes]
) -> None:
    write(tmp_path, 3, 8, [b"of 3"], [b"left by 3"])
    write(tmp_path, 4, 12, [b"of 4"], [b"left by 4"])
    assert prompt_checkpoint.undelivered(str(tmp_path), 4, (0, position, 2 * position, position)) == expected


def test_a_second_resume_from_one_checkpoint_finds_what_the_first_one_found(tmp_path: Path) -> None:
    write(tmp_path, 4, 12, [b"of 4"], [b"left by 4"])
    found = prompt_checkpoint.undelivered(str(tmp_path), 4, (0, 12, 24, 12))
    write(tmp_path, 4, 14, [b"of 4 again"], [b"left by the first resume, which died"])
    assert prompt_checkpoint.undelivered(str(tmp_path), 4, (0, 12, 24, 12)) == found


def test_prompt_checkpoints_without_a_checkpoint_are_removed_in_time(tmp_path: Path) -> None:
    state = tmp_path / "rollout" / "global_dataset_state_dict_2.pt"
    state.parent.mkdir()
    state.touch()
    for rollout_id in range(10):
        write(tmp_path, rollout_id, rollout_id, [], [])
    left = sorted(int(p.name.split(".")[0].split("_")[-1]) for p in state.parent.glob("fa_rollout_*.pkl"))
    assert left == [2, 3, 7, 8, 9]


def test_the_rest_of_a_group_comes_back_with_its_shape_and_attributes(tmp_path: Path) -> None:
    def sample(index: int) -> Sample:
        made = Sample(index=index, tokens=[1, 2], response_length=1, loss_mask=[1], reward={"a": 1})
        made.extra = "ad hoc"  # type: ignore[attr-defined]
        return made

    group = [sample(0), [sample(1), sample(2)]]
    shape, samples = wire.decode_rest(wire.encode_rest(group, str(tmp_path)))
    back = wire.regroup(shape, samples)
    assert [back[0].index, [s.index for s in back[1]]] == [0, [1, 2]]
    for made in samples:
        assert made.extra == "ad hoc"
        assert made.reward == {"a": 1}
        assert made.rollout_log_probs is None, "what was None needs no column"
        assert "tokens" not in vars(made), "this comes by the ring"


def test_a_large_rest_goes_by_a_file_that_is_gone_afterwards(tmp_path: Path) -> None:
    sample = Sample(index=0, multimodal_train_inputs={"pixels": b"x" * (wire.INLINE_BYTES + 1)})
    payload = wire.encode_rest([sample], str(tmp_path))
    assert len(payload) < 1000
    assert len(list(tmp_path.iterdir())) == 1
    _, (back,) = wire.decode_rest(payload)
    assert back.multimodal_train_inputs == sample.multimodal_train_inputs
    assert not list(tmp_path.iterdir())


def test_options_come_from_arguments_before_the_environment() -> None:
    args = SimpleNamespace(fa_rollout_staleness=2, other=1)
    options = read_options(
        args, {"FA_ROLLOUT_STALENESS": "9", "FA_ROLLOUT_ARRAYS": "true", "FA_ROLLOUT_RUN": "x"}
    )
    assert options == Options(staleness=2, arrays=True)
    with pytest.raises(ConfigError, match="fa_rollout_on_error"):
        read_options(SimpleNamespace(fa_rollout_on_eror="retry"), {})
    with pytest.raises(ConfigError, match=r'fa_rollout_on_error must be "raise" or "retry", found .retyr.'):
        read_options(SimpleNamespace(), {"FA_ROLLOUT_ON_ERROR": "retyr"})
    with pytest.raises(ConfigError, match=r"fa_rollout_staleness must be a whole number, found .two."):
        read_options(SimpleNamespace(), {"FA_ROLLOUT_STALENESS": "two"})


def test_the_page_has_every_option_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "slime.md").read_text()
    rows = dict(re.findall(r"^\| `fa_rollout_(\w+)` \| ([^|]+) \|", page, re.MULTILINE))
    assert rows.keys() == set(Options.__struct_fields__)
    for name, default in msgspec.structs.asdict(Options()).items():
        if default is not None:
            assert rows[name].strip("`") == str(default).lower().removesuffix(".0"), name


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"custom_rm_path": None}, False),
        ({}, True),
        ({"custom_rm_path": None, "rollout_sample_hook_path": ["a.b"]}, True),
        ({"custom_rm_path": None, "dynamic_sampling_filter_path": "a.b"}, True),
        (
            {
                "custom_rm_path": None,
                "dynamic_sampling_filter_path": "slime.rollout.filter_hub.dynamic_sampling_filters.check",
            },
            False,
        ),
    ],
)
def test_samples_hold_lists_where_code_of_the_users_may_look(
    tmp_path: Path, changes: dict[str, Any], shown: bool
) -> None:
    assert shows_samples(arguments(tmp_path, "http://127.0.0.1:9", **changes)) == shown


def test_every_set_of_arguments_makes_a_configuration_that_is_taken(tmp_path: Path) -> None:
    args = arguments(
        tmp_path, "http://127.0.0.1:9", num_rollout=None, num_epoch=3, over_sampling_batch_size=10
    )
    num_steps = num_rollouts(args, DataSource(args))
    assert num_steps == 3 * 1000 // 4
    options = Options(ring_bytes="128MiB", stall_s="5m")
    config = from_dict(config_tree(args, options, num_steps=num_steps, num_prompts=100))
    assert config.rollout.surplus_groups == 6
    assert config.ring.bytes == 128 << 20
    assert config.trainer.stall_s == 300.0
    assert config.rollout.staleness == 3
    assert config.rollout.max_rejections == 100
