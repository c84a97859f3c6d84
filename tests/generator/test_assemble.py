"""A record is true or refused; what is refused names the field."""

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from fa_rollout.generator.base.errors import SampleRefused
from fa_rollout.generator.records.assemble import build_record, check_sample
from fa_rollout.sample import Sample
from shm import Descriptor
from tests.generator.samples import identity, scored_sample
from trainer_hook.record import COLUMNS, RecordHead, VersionSpan

BAD_FIELDS: list[tuple[str, str, Any]] = [
    ("a log-probability missing", "logprobs", np.zeros(3, np.float32)),
    ("log-probabilities absent", "logprobs", None),
    ("NaN", "logprobs", np.array([0, np.nan, 0, 0], np.float32)),
    ("minus infinity", "logprobs", np.array([0, -np.inf, 0, 0], np.float32)),
    ("positive", "logprobs", np.array([0, 0.5, 0, 0], np.float32)),
    ("beyond float32", "logprobs", np.array([0, -1e300, 0, 0], np.float64)),
    ("whole numbers as log-probabilities", "logprobs", np.zeros(4, np.int32)),
    ("mask too long", "loss_mask", np.ones(5, np.uint8)),
    ("mask of 2", "loss_mask", np.array([1, 2, 1, 1], np.uint8)),
    ("mask of -1", "loss_mask", np.array([1, -1, 1, 1], np.int64)),
    ("mask of shares", "loss_mask", np.full(4, 0.5, np.float32)),
    ("ids as a list", "response_ids", [1, 2, 3, 4]),
    ("ids in two dimensions", "response_ids", np.zeros((2, 2), np.int32)),
    ("negative id", "response_ids", np.array([1, -2, 3, 4], np.int32)),
    ("id beyond 32 bits", "response_ids", np.array([1, 2**31, 3, 4], np.int64)),
    ("no prompt", "prompt_ids", np.empty(0, np.int32)),
    ("spans too short", "version_spans", [VersionSpan(1, 3)]),
    ("spans too long", "version_spans", [VersionSpan(1, 5)]),
    ("spans that do not rise", "version_spans", [VersionSpan(1, 2), VersionSpan(2, 2), VersionSpan(2, 4)]),
    ("no spans", "version_spans", []),
    ("a version as text", "version_spans", [VersionSpan("1", 4)]),  # type: ignore[arg-type]
    ("a version of numpy's", "version_spans", [VersionSpan(np.int64(1), 4)]),  # type: ignore[arg-type]
    ("a version between two", "version_spans", [VersionSpan(1.5, 4)]),  # type: ignore[arg-type]
    ("spans as pairs", "version_spans", [(1, 4)]),
    ("no finish", "finish_reason", None),
    ("a finish that is none", "finish_reason", "over"),
    ("no reward", "reward", None),
    ("a reward that is not finite", "reward", float("nan")),
    ("a reward beyond float32", "reward", 1e39),
]


@pytest.mark.parametrize(
    ("field", "value"), [case[1:] for case in BAD_FIELDS], ids=[case[0] for case in BAD_FIELDS]
)
def test_a_sample_that_is_not_true_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    sample = scored_sample()
    setattr(sample, field, value)
    with pytest.raises(SampleRefused, match=rf"^{field}: "):
        check_sample(sample)


def test_zero_and_minus_zero_are_log_probabilities() -> None:
    sample = scored_sample()
    sample.logprobs = np.array([0.0, -0.0, -0.0, 0.0], np.float32)
    check_sample(sample)


def test_a_sample_without_tokens_is_true_and_a_group_without_any_is_not() -> None:
    empty = scored_sample(num_tokens=0)
    check_sample(empty)
    build_record([empty, scored_sample(member=1)], identity(), [1.0, 1.0], 2.0)
    with pytest.raises(SampleRefused, match=r"^response_ids: a group must have"):
        build_record([empty], identity(), [1.0], 2.0)


def _filled(samples: list[Sample], rewards: list[float]) -> tuple[RecordHead, dict[str, np.ndarray]]:
    record = build_record(samples, identity(), rewards, 2.0)
    arrays = [np.empty(field.shape, field.dtype) for field in record.fields]
    record.fill(arrays)
    head = msgspec.msgpack.decode(record.head, type=RecordHead)
    return head, dict(zip([column.name for column in COLUMNS], arrays, strict=True))


def test_the_columns_of_a_record_are_the_samples_packed() -> None:
    first, second = scored_sample(num_tokens=4, reward=1.0), scored_sample(member=1, num_tokens=1, reward=0.5)
    head, arrays = _filled([first, second], [1.0, 0.5])
    assert arrays["tokens"].tolist() == [10, 11, 12, 100, 101, 102, 103, 10, 11, 12, 100]
    assert arrays["cu_seqlens"].tolist() == [0, 7, 11]
    assert arrays["cu_responses"].tolist() == [0, 4, 5]
    np.testing.assert_array_equal(arrays["logprobs"], np.concatenate([first.logprobs, second.logprobs]))
    assert arrays["loss_mask"].tolist() == [1] * 5
    assert arrays["span_versions"].tolist() == [1, 2, 1]
    assert arrays["span_ends"].tolist() == [2, 4, 1]
    assert arrays["cu_spans"].tolist() == [0, 2, 3]
    assert arrays["rewards"].tolist() == [1.0, 0.5]
    assert [(column.name, arrays[column.name].dtype.str) for column in COLUMNS] == [
        (column.name, column.dtype) for column in COLUMNS
    ]
    assert (head.group, head.members, head.finish_reasons) == (5, [0, 1], ["stop", "stop"])


def test_reward_statistics_are_over_the_executions_with_one_degree_of_freedom_less() -> None:
    samples = [scored_sample(member=m, reward=r) for m, r in ((0, 1.0), (0, 1.0), (1, 4.0))]
    head, _ = _filled(samples, [1.0, 4.0])
    assert (head.reward_mean, head.reward_count) == (2.5, 2)
    assert head.reward_std == pytest.approx(np.std([1.0, 4.0], ddof=1))
    head, _ = _filled([scored_sample()], [1.0])
    assert (head.reward_mean, head.reward_std, head.reward_count) == (1.0, 0.0, 1)


def test_a_member_that_is_not_trained_counts_in_no_figure_and_may_have_no_reward() -> None:
    samples = [scored_sample(member=member, reward=float(member)) for member in range(4)]
    samples[1].loss_mask[:] = 0
    samples[1].reward = None
    samples[2].loss_mask[:] = 0
    head, arrays = _filled(samples, [0.0, 3.0])
    assert (head.excluded, head.reward_mean, head.reward_count) == ([1, 2], 1.5, 2)
    np.testing.assert_array_equal(arrays["rewards"], np.array([0, np.nan, 2, 3], np.float32))
    record = build_record(samples, identity(), [0.0, 3.0], 2.0)
    assert record.commit_message(Descriptor(1, 0, 0, 64), 64).rewards == [0.0, None, None, 3.0]
    samples[1].loss_mask[0] = 1
    with pytest.raises(SampleRefused, match=r"^reward: .* or None where the loss mask is all 0, found None"):
        check_sample(samples[1])


@pytest.mark.parametrize("reward", [100.1, 0.1, -0.7])
def test_of_equal_rewards_none_differs_from_their_mean(reward: float) -> None:
    head, arrays = _filled([scored_sample(member=i, reward=reward) for i in range(3)], [reward] * 3)
    assert (arrays["rewards"].astype(np.float64) == head.reward_mean).all()
    assert head.reward_std == 0.0


def test_metadata_travels_once_and_a_samples_own_entries_beside_it() -> None:
    first, second = scored_sample(), scored_sample(member=1)
    second.metadata = {"source": "test", "turns": np.int64(3), "scores": np.array([1.0, 2.0])}
    second.reward_parts = {"format": 0.5}
    head, _ = _filled([first, second], [1.0, 1.0])
    assert head.metadata == {"source": "test"}
    own = {"source": "test", "turns": 3, "scores": [1.0, 2.0], "reward_parts": {"format": 0.5}}
    assert head.sample_metadata == [{}, own]


def test_metadata_that_is_no_plain_data_is_refused() -> None:
    sample = scored_sample()
    sample.metadata["open"] = object()
    with pytest.raises(SampleRefused, match=r"^metadata: must be plain data"):
        build_record([sample], identity(), [1.0], 2.0)


def test_a_commit_tells_lengths_versions_and_loss_tokens_by_span() -> None:
    first, second = scored_sample(num_tokens=4), scored_sample(member=1, num_tokens=6)
    second.loss_mask[2:5] = 0
    record = build_record([first, second], identity(), [1.0, 1.0], 2.0)
    commit = record.commit_message(Descriptor(7, 8, 64, 128), lowest_open=192)
    assert (commit.incarnation, commit.sequence, commit.position, commit.length) == (7, 8, 64, 128)
    assert (commit.lowest_open, commit.group, commit.attempt) == (192, 5, 0)
    assert (commit.oldest_version, commit.newest_version) == (1, 2)
    assert (commit.prompt_lens, commit.response_lens, commit.loss_lens) == ([3, 3], [4, 6], [4, 3])
    assert commit.spans == [[(1, 2, 2), (2, 4, 2)], [(1, 3, 2), (2, 6, 1)]]
    assert commit.rewards == [1.0, 1.0]


def test_an_unknown_version_is_the_oldest() -> None:
    sample = scored_sample()
    sample.version_spans = [VersionSpan(3, 2), VersionSpan(-1, 4)]
    commit = build_record([sample], identity(), [1.0], 2.0).commit_message(Descriptor(1, 0, 0, 64), 64)
    assert (commit.oldest_version, commit.newest_version) == (-1, 3)


def test_a_chat_prompt_travels_as_json() -> None:
    messages = [{"role": "user", "content": "2 + 2 = ? (as \u00bc)"}]
    chat = dataclasses.replace(identity(), prompt=messages)
    record = build_record([scored_sample()], chat, [1.0], 2.0)
    head = msgspec.msgpack.decode(record.head, type=RecordHead)
    assert msgspec.json.decode(head.prompt) == messages
