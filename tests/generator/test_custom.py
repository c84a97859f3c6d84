"""Samples that a custom generate function builds: ids, mask, log-probabilities and versions stay in step."""

import dataclasses

import numpy as np
import pytest

from fa_rollout.generator.base.errors import SampleRefused
from fa_rollout.generator.records.assemble import check_sample
from fa_rollout.generator.rollouts.custom import append_tool, append_turn, as_samples, identity_of, sample_ids
from fa_rollout.generator.turns.turn import Turn
from fa_rollout.sample import FinishReason, Sample
from tests.generator.samples import fresh_sample
from trainer_hook.record import TokenSampling, VersionSpan


def _turn(sample: Sample, ids: list[int], *spans: tuple[int, int], extra: tuple[int, ...] = ()) -> Turn:
    """An answer to all ids of the sample, with some more of the caller's behind them."""
    return Turn(
        input_ids=np.concatenate([sample_ids(sample), np.array(extra, np.int32)]),
        output_ids=np.array(ids, np.int32),
        logprobs=np.full(len(ids), -0.5, np.float32),
        version_spans=tuple(VersionSpan(version, end) for version, end in spans),
        finish_reason=FinishReason.STOP,
    )


def _spans(sample: Sample) -> list[tuple[int, int]]:
    return [(span.version, span.end) for span in sample.version_spans]


def test_turns_and_tool_output_grow_all_fields_together() -> None:
    sample = fresh_sample()
    append_turn(sample, _turn(sample, [1, 2, 3, 4, 5], (1, 5)))
    append_turn(sample, _turn(sample, [6, 7, 8], (2, 3)))
    assert _spans(sample) == [(1, 5), (2, 8)]
    append_tool(sample, [9, 9, 9, 9])
    append_turn(sample, _turn(sample, [10, 11], (2, 1), (3, 2)))
    assert sample.response_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 10, 11]
    assert sample.loss_mask.tolist() == [1] * 8 + [0] * 4 + [1] * 2
    assert sample.logprobs.tolist() == [-0.5] * 8 + [0.0] * 4 + [-0.5] * 2
    assert _spans(sample) == [(1, 5), (2, 13), (3, 14)]
    sample.reward = 1.0
    check_sample(sample)


def test_each_turn_keeps_the_settings_that_it_was_sampled_with() -> None:
    sample = fresh_sample()
    hot, cold = TokenSampling(temperature=2.0), TokenSampling(temperature=0.5, top_k=20)
    for ids, settings in (([1, 2], hot), ([3], hot), ([4, 5], cold)):
        append_turn(sample, dataclasses.replace(_turn(sample, ids, (1, len(ids))), sampling=settings))
    append_tool(sample, [9, 9])
    assert [(span.settings, span.end) for span in sample.sampling_spans] == [(hot, 3), (cold, 7)]
    sample.reward = 1.0
    check_sample(sample)
    sample.sampling_spans.pop()
    with pytest.raises(SampleRefused, match=r"^sampling_spans: must be rising ends up to 7"):
        check_sample(sample)


def test_what_a_prompt_adds_to_the_ids_so_far_is_tool_output() -> None:
    sample = fresh_sample()
    append_turn(sample, _turn(sample, [1, 2], (1, 2)))
    append_turn(sample, _turn(sample, [5], (1, 1), extra=(3, 4)))
    assert sample.response_ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.loss_mask.tolist() == [1, 1, 0, 0, 1]


def test_tool_output_before_the_first_turn_has_the_first_turns_version() -> None:
    sample = fresh_sample()
    append_tool(sample, [7, 7])
    append_turn(sample, _turn(sample, [1, 2], (4, 2)))
    assert _spans(sample) == [(4, 4)]


@pytest.mark.parametrize("damage", ["encoded again", "cut", "another sample's"])
def test_a_turn_whose_prompt_is_not_the_ids_so_far_is_refused(damage: str) -> None:
    sample = fresh_sample()
    append_turn(sample, _turn(sample, [1, 2, 3], (1, 3)))
    turn = _turn(sample, [4], (1, 1))
    prompt = {
        "encoded again": np.concatenate([sample.prompt_ids, [12, 3]]).astype(np.int32),
        "cut": turn.input_ids[:-1],
        "another sample's": np.arange(6, dtype=np.int32),
    }[damage]
    wrong = Turn(
        input_ids=prompt,
        output_ids=turn.output_ids,
        logprobs=turn.logprobs,
        version_spans=turn.version_spans,
        finish_reason=turn.finish_reason,
    )
    with pytest.raises(SampleRefused, match=r"^tokens: a turn's prompt must begin with the sample's 6 ids"):
        append_turn(sample, wrong)
    assert sample.response_ids.tolist() == [1, 2, 3]


def test_a_turn_without_room_adds_nothing_but_its_finish() -> None:
    sample = fresh_sample()
    append_turn(sample, _turn(sample, [1], (1, 1)))
    empty = Turn(
        input_ids=sample_ids(sample),
        output_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        version_spans=(),
        finish_reason=FinishReason.LENGTH,
    )
    append_turn(sample, empty)
    assert sample.response_ids.tolist() == [1]
    assert sample.finish_reason is FinishReason.LENGTH


def test_a_generate_function_returns_samples_of_its_own_execution() -> None:
    sample = fresh_sample()
    own = identity_of(sample)
    assert as_samples(sample, own) == [sample]
    assert as_samples((sample, sample), own) == [sample, sample]
    for wrong in (None, [], "text", [sample, None], {"sample": sample}):
        with pytest.raises(SampleRefused, match=r"^samples: "):
            as_samples(wrong, own)
    with pytest.raises(SampleRefused, match=r"^member: "):
        as_samples(fresh_sample(member=1), own)
    sample.group += 1
    with pytest.raises(SampleRefused, match=r"^member: "):
        as_samples(sample, own)
