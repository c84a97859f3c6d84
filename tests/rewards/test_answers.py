"""Answers of reward workers: every form comes whole, and bytes that are none have no effect."""

import os
import pickle
from typing import Any

import numpy as np
import pytest

from fa_rollout.rewards.function import FunctionKind
from fa_rollout.rewards.outcomes import FailureReason, RewardFailed, Scored
from fa_rollout.rewards.workers import answers
from fa_rollout.rewards.workers.protocol import Done, WorkerReady, WorkerRefused

FAILED = RewardFailed(reason=FailureReason.RAISED, text="line\nline")
ANSWERS = [
    WorkerReady(FunctionKind.PLAIN),
    WorkerRefused("why"),
    Done(FAILED, 0.5),
    Done([Scored(value=1.5, parts={"a": 2.0}), FAILED], 1),
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_comes_as_it_was_sent(answer: answers.Answer) -> None:
    assert answers.decode(answers.encode(answer)) == answer


def test_token_rewards_come_as_they_were_sent() -> None:
    sent = np.array([0.1, -2.0], np.float32)
    found = answers.decode(answers.encode(Done([Scored(value=0.0, token_rewards=sent)], 0.0)))
    assert isinstance(found, Done)
    (outcome,) = found.outcomes if isinstance(found.outcomes, list) else []
    assert isinstance(outcome, Scored)
    assert outcome.token_rewards is not None
    assert outcome.token_rewards.tolist() == sent.tolist()
    assert outcome.token_rewards.flags.writeable


class _Acts:
    def __reduce__(self) -> Any:
        return os._exit, (3,)


@pytest.mark.parametrize(
    "data", [pickle.dumps(_Acts()), b"", b"\x00", b"\xc1" * 100, answers.encode(ANSWERS[3])[:-1]]
)
def test_other_bytes_are_refused_and_do_nothing(data: bytes) -> None:
    with pytest.raises(answers.BadAnswer):
        answers.decode(data)
