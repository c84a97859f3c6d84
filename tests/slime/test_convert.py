"""The fast conversion gives, value by value, what slime's own gives; and nothing is copied afterwards."""

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from slime.utils.types import Sample

import fa_rollout

ARGS: dict[str, Any] = {
    "advantage_estimator": "grpo",
    "custom_reward_post_process_path": None,
    "grpo_std_normalization": True,
    "n_samples_per_prompt": 2,
    "reward_key": None,
    "rewards_normalization": True,
    "rollout_batch_size": 2,
    "rollout_top_p": 1.0,
    "use_rollout_routing_replay": False,
}


def samples(**changes: Any) -> list[Sample]:
    return [
        Sample(
            index=index,
            tokens=[index, 7, 8, 9],
            response_length=3,
            rollout_log_probs=[-0.5, -1.0, -0.25 * index],
            loss_mask=[1, 0, 1],
            reward=float(index),
            status=Sample.Status.TRUNCATED if index == 3 else Sample.Status.COMPLETED,
            metadata={"source_name": "toy"},
            **changes,
        )
        for index in range(4)
    ]


def convert(made: list[Sample], **changes: Any) -> dict[str, Any]:
    return fa_rollout.convert_samples_to_train_data(SimpleNamespace(**(ARGS | changes)), made)


def test_long_columns_are_tensors_of_the_types_that_slime_trains_on() -> None:
    data = convert(samples())
    assert [t.tolist() for t in data["tokens"]] == [[index, 7, 8, 9] for index in range(4)]
    assert [t.tolist() for t in data["loss_masks"]] == [[1, 0, 1]] * 4
    assert data["rollout_log_probs"][2].tolist() == [-0.5, -1.0, -0.5]
    for name, dtype in (
        ("tokens", torch.int64),
        ("loss_masks", torch.int32),
        ("rollout_log_probs", torch.float32),
    ):
        for tensor in data[name]:
            taken = torch.as_tensor(tensor, dtype=dtype).detach().cpu().contiguous()
            assert taken is tensor, "slime's next step takes it as it is"


def test_what_a_trainer_takes_out_of_the_store_is_an_ordinary_tensor() -> None:
    for tensor in convert(samples())["tokens"]:
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(tensor, 5, buffer_callback=buffers.append)
        (stored,) = (bytes(buffer) for buffer in buffers)
        assert len(pickled) < 300, "its elements go beside the pickle, without a copy"
        taken = pickle.loads(pickled, buffers=[stored])
        assert type(taken) is torch.Tensor
        assert taken.dtype == tensor.dtype
        assert taken.tolist() == tensor.tolist()
        taken[0] = 5  # of its own memory
        assert type(tensor + 1) is torch.Tensor


def test_the_small_columns_are_slimes() -> None:
    data = convert(samples())
    assert data["response_lengths"] == [3] * 4
    assert data["truncated"] == [0, 0, 0, 1]
    assert data["sample_indices"] == data["rollout_ids"] == [0, 1, 2, 3]
    assert data["raw_reward"] == [0.0, 1.0, 2.0, 3.0]
    assert data["source_names"] == ["toy"] * 4
    assert data["rollout_mask_sums"] == [2] * 4
    half = 0.5 / (np.std([0, 1], ddof=1) + 1e-6)
    assert data["rewards"] == pytest.approx([-half, half, -half, half], rel=1e-5)


def test_siblings_of_one_execution_share_its_mask_sum_and_others_get_free_ids() -> None:
    made = samples()
    made[1].rollout_id = made[2].rollout_id = 0
    data = convert(made)
    assert data["rollout_ids"] == [1, 0, 0, 2]
    assert data["rollout_mask_sums"] == [2, 4, 4, 2]


def test_uneven_groups_are_normalized_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    data = convert(samples()[:3])
    assert data["rewards"] == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)
    assert convert(samples(), rewards_normalization=False)["rewards"] == [0.0, 1.0, 2.0, 3.0]


def test_removed_samples_leave_the_loss_and_missing_masks_are_whole() -> None:
    made = samples()
    made[0].remove_sample = True
    made[1].loss_mask = None
    data = convert(made)
    assert [t.tolist() for t in data["loss_masks"][:2]] == [[0, 0, 0], [1, 1, 1]]
    made[2].loss_mask = [1]
    with pytest.raises(ValueError, match="as long as its response"):
        convert(made)


def test_arrays_become_tensors_over_their_own_memory() -> None:
    made = samples()
    for sample in made:
        sample.tokens = np.array(sample.tokens, np.int64)  # type: ignore[assignment]
        sample.rollout_log_probs = np.array(sample.rollout_log_probs, np.float32)  # type: ignore[assignment]
    data = convert(made)
    assert data["tokens"][0].data_ptr() == made[0].tokens.ctypes.data  # type: ignore[attr-defined]
    assert data["rollout_log_probs"][0].data_ptr() == made[0].rollout_log_probs.ctypes.data  # type: ignore[union-attr]


def test_replays_and_raw_rewards_follow_when_samples_have_them() -> None:
    made = samples()
    made[1].metadata["raw_reward"] = 9.0
    for sample in made:
        sample.rollout_top_p_token_ids = [1, 2, 3, 4]
        sample.rollout_top_p_token_offsets = [0, 1, 2, 4]
        sample.rollout_routed_experts = np.zeros((3, 2, 1), np.int32)
        sample.train_metadata = {"loss": "a"}
    data = convert(made, rollout_top_p=0.9, use_rollout_routing_replay=True)
    assert data["raw_reward"] == [0.0, 9.0, 2.0, 3.0]
    assert data["rollout_top_p_token_offsets"][0] == [0, 1, 2, 4]
    assert data["rollout_routed_experts"][0].shape == (3, 2, 1)
    assert data["metadata"] == [{"loss": "a"}] * 4
    made[2].rollout_top_p_token_ids = None
    with pytest.raises(ValueError, match="top-p replay"):
        convert(made, rollout_top_p=0.9)
