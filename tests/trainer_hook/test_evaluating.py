"""An evaluation as the trainer's side sees it: begun, collected part by part, cancelled."""

import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from peer import Hub, Line

from trainer_hook import (
    EvaluatedPrompt,
    EvaluatedSample,
    Evaluation,
    EvaluationFailed,
    HookError,
    TrainerHook,
)
from trainer_hook import messages as m
from trainer_hook.calls.evaluation import order_of


def sample(reward: float = 1.0, spans: tuple[tuple[int, int], ...] = ((3, 2),)) -> EvaluatedSample:
    return EvaluatedSample(
        member=0,
        raw_tokens=np.array([7, 8, 9], "<i4").tobytes(),
        prompt_length=1,
        raw_logprobs=np.array([-0.5, -0.25], "<f4").tobytes(),
        raw_loss_mask=bytes([1, 0]),
        version_spans=list(spans),
        response="ab",
        finish_reason="stop",
        reward=reward,
    )


def prompt(index: int, *samples: EvaluatedSample, failure: str | None = None) -> EvaluatedPrompt:
    return EvaluatedPrompt(index=index, prompt="p", label=None, samples=list(samples), failure=failure)


def begin(line: Line) -> m.EvaluationOrder:
    request = line.receive(m.Evaluate)
    line.send(m.EvaluationBegun(request=request.request, evaluation=4))
    return request.order


def answer(line: Line, *prompts: EvaluatedPrompt, is_over: bool = False) -> None:
    request = line.receive(m.Collect)
    assert request.evaluation == 4
    results = [msgspec.msgpack.encode(each) for each in prompts]
    line.send(m.EvaluationPart(request=request.request, results=results, num_prompts=3, is_over=is_over))


def test_parts_are_collected_until_the_last_and_prompts_come_in_the_order_of_the_data(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        order = begin(line)
        assert (order.dataset, order.prompts, order.samples_per_prompt) == ("math", None, 2)
        answer(line, prompt(2, sample(0.0)))
        answer(line, prompt(0, sample(1.0)), prompt(1, failure="no"), is_over=True)

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        result = hook.evaluate("math", samples_per_prompt=2)
        assert [each.index for each in result.prompts] == [0, 1, 2]
        assert (result.num_failed, result.reward_mean, result.version) == (1, 0.5, 3)
        first = result.samples[0]
        assert first.tokens.tolist() == [7, 8, 9]
        assert first.logprobs.tolist() == [-0.5, -0.25]
        assert (first.loss_mask.tolist(), first.response_length) == ([1, 0], 2)


def test_what_has_come_is_taken_without_waiting(tmp_path: Path) -> None:
    asked, may_end = threading.Event(), threading.Event()

    def script(line: Line) -> None:
        begin(line)
        answer(line, prompt(0))
        asked.set()
        assert may_end.wait(10)
        answer(line, prompt(1), is_over=True)

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        pending = hook.begin_evaluation()
        assert not pending.is_ready()
        assert asked.wait(10)
        while pending.num_done == 0:
            assert not pending.is_ready()
        assert (pending.num_done, pending.num_prompts) == (1, 3)
        may_end.set()
        assert len(pending.result().prompts) == 2
        assert pending.is_ready()
        pending.cancel()  # it is over: nothing is sent


def test_an_evaluation_that_is_left_early_is_cancelled_once(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        begin(line)
        cancel = line.receive(m.CancelEvaluation)
        assert cancel.evaluation == 4
        line.send(m.Reply(request=cancel.request))
        line.receive(m.Goodbye)

    with Hub(tmp_path, script) as hub, TrainerHook.attach(**hub.where) as hook:
        with pytest.raises(KeyError), hook.begin_evaluation() as pending:
            raise KeyError("the trainer's own")
        pending.cancel()


def test_a_refusal_is_raised_by_its_name(tmp_path: Path) -> None:
    def script(line: Line) -> None:
        begin(line)
        request = line.receive(m.Collect)
        line.send(m.Refused(request=request.request, error="EvaluationFailed", text="no such file"))
        cancel = line.receive(m.CancelEvaluation)
        line.send(m.Reply(request=cancel.request))

    with (
        Hub(tmp_path, script) as hub,
        TrainerHook.attach(**hub.where) as hook,
        pytest.raises(EvaluationFailed, match="no such file"),
    ):
        hook.evaluate("no/such/file.jsonl")


def test_a_hub_that_goes_ends_an_evaluation(tmp_path: Path) -> None:
    with (
        Hub(tmp_path, lambda line: None) as hub,
        TrainerHook.attach(**hub.where) as hook,
        pytest.raises(HookError),
    ):
        hook.evaluate()


@pytest.mark.parametrize(
    ("spans", "version", "is_mixed"),
    [
        ([((3, 2),), ((3, 2),)], 3, False),
        ([((3, 2),), ((4, 2),)], None, True),
        ([((3, 1), (4, 2)), ((4, 2),)], None, True),
        ([((-1, 2),), ((-1, 2),)], None, True),
        ([], None, False),
    ],
)
def test_an_evaluation_is_of_one_version_or_says_that_it_is_mixed(
    spans: list[Any], version: int | None, is_mixed: bool
) -> None:
    result = Evaluation(prompts=tuple(prompt(i, sample(spans=each)) for i, each in enumerate(spans)))
    assert (result.version, result.is_mixed) == (version, is_mixed)


def test_prompts_are_text_messages_or_dicts_and_text_alone_names_a_data_set() -> None:
    order = order_of(
        ["text", [{"role": "user", "content": "hi"}], {"prompt": "full", "label": 3}],
        samples_per_prompt=None,
        sampling={"temperature": 0.0},
    )
    assert order.prompts is not None
    assert [(each.prompt, each.label) for each in order.prompts] == [
        ("text", None),
        ([{"role": "user", "content": "hi"}], None),
        ("full", 3),
    ]
    assert order_of("name", samples_per_prompt=1, sampling=None).dataset == "name"
    with pytest.raises(ValueError, match="samples_per_prompt must be 1 or more"):
        order_of("name", samples_per_prompt=0, sampling=None)
