"""A sample has one text and one end, however many requests made it, and whoever sent them."""

import asyncio
import base64
import dataclasses
import inspect
import json
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from slime.utils.types import Sample

from fa_rollout.client.wire.completion import Completion
from fa_rollout.generator.turns.ending import Ends
from fa_rollout.generator.turns.turn import Draft, Turn
from fa_rollout.sample import FinishReason
from fa_rollout.slime import upstream
from fa_rollout.slime.generation.fast import FastGenerate
from fa_rollout.slime.generation.group_context import GROUP_CONTEXT
from fa_rollout.slime.generation.whole import Whole, WholeGenerate, learn_ends, whole_function
from trainer_hook.record import VersionSpan

EOS = 0
PROMPT = [7, 8, 9]
TEXT = "na\u00efve \u2192 \U0001f642"
ARGS = SimpleNamespace(
    partial_rollout=True,
    mask_offpolicy_in_partial_rollout=False,
    rollout_top_p=1.0,
    use_rollout_routing_replay=False,
    num_layers=1,
    moe_router_topk=1,
)
Params = dict[str, Any]


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8; 0 ends an answer, and is special."""

    eos_token_id = EOS

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        kept = [ident for ident in ids if ident != EOS or not skip_special_tokens]
        return bytes(kept).decode(errors="replace")


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def piece(ids: list[int], finish: str, **meta: Any) -> Completion:
    """What an engine answers, with the text that it makes of this piece alone."""
    info = {"finish_reason": {"type": finish}, "weight_version": "1", **meta}
    text = Bytes().decode(ids, skip_special_tokens=True)
    return Completion(
        output_ids=np.array(ids, np.int32),
        logprobs=np.full(len(ids), -0.5, np.float32),
        finish=finish,
        versions=(("1", len(ids)),),
        has_spans=True,
        rest=json.dumps({"text": text, "meta_info": info}).encode(),
    )


class Answers:
    """Stands where the requester stands: its answers come in pieces, which end by the rules of `Ends`."""

    def __init__(self, ends: Ends, pieces: list[Completion]) -> None:
        self._ends = ends
        self._pieces = pieces
        self.prompts: list[list[int]] = []

    async def sample_turn(self, ticket: Any, prompt_ids: Any, params: Params) -> Turn:
        self.prompts.append(np.asarray(prompt_ids).tolist())
        draft, end = Draft(), None
        while end is None:
            completion = self._pieces.pop(0)
            draft.add(completion, [VersionSpan(1, len(completion.output_ids))])
            end = self._ends.find(draft.output_ids, params)
            if end is None and completion.finish != "abort":
                return draft.finish(prompt_ids, FinishReason(completion.finish))
        draft.cut(end.num_tokens)
        return draft.finish(prompt_ids, end.reason)


def params(**changes: Any) -> Params:
    return {"max_new_tokens": 64, "no_stop_trim": True, "skip_special_tokens": True} | changes


def partial(ids: list[int]) -> Sample:
    """A sample that an abort left in the middle of its answer."""
    sample = Sample(prompt="p", tokens=list(PROMPT))
    sample.append_response_tokens(
        ARGS,
        tokens=ids,
        log_probs=[-0.5] * len(ids),
        meta_info={"finish_reason": {"type": "abort"}},
        text=Bytes().decode(ids, skip_special_tokens=True),
    )
    return sample


class Bench:
    def __init__(self, *, arrays: bool = False) -> None:
        rollout = SimpleNamespace(
            generate=None,
            GenerateState=lambda args: SimpleNamespace(tokenizer=None, processor=None),
            _prepare_prompt_ids=lambda sample, tokenizer, processor: sample.tokens,
        )
        self.slime = dataclasses.replace(upstream.load(), sglang_rollout=rollout)
        self.ends = Ends()
        learn_ends(self.ends, Bytes())
        self.whole = Whole(self.slime, Bytes(), self.ends)
        self.arrays = arrays

    def fast(self, sample: Sample, pieces: list[Completion], given: Params) -> Answers:
        answers = Answers(self.ends, pieces)
        generate = FastGenerate(self.slime, answers, self.whole, arrays=self.arrays)  # type: ignore[arg-type]

        async def run() -> None:
            context: Any = SimpleNamespace(
                job=None,
                prompt_ids=np.array(PROMPT, np.int32),
                prompt="p",
                begun={},
                spans={},
                deadline=SimpleNamespace(paused=nullcontext, renew=lambda: None),
            )
            GROUP_CONTEXT.set(context)
            await generate(ARGS, sample, given)

        asyncio.run(run())
        return answers

    def own(self, sample: Sample, completion: Completion, given: Params) -> list[int]:
        """By slime's own `generate`, which knows one answer a call."""
        asked: list[int] = []

        async def generate(args: Any, sample: Sample, sampling_params: Params) -> Sample:
            asked.append(len(sample.tokens))
            answer = json.loads(completion.rest)
            sample.append_response_tokens(
                args,
                tokens=completion.output_ids.tolist(),
                log_probs=completion.logprobs.tolist(),
                meta_info=answer["meta_info"],
                text=answer["text"],
            )
            return sample

        asyncio.run(WholeGenerate(generate, self.whole)(ARGS, sample, given))
        return asked


def assert_whole(sample: Sample, ids: list[int], status: Any) -> None:
    response = np.asarray(sample.tokens)[len(PROMPT) :].tolist()
    assert response == ids
    assert sample.response_length == len(ids) == len(sample.loss_mask or []) == len(sample.rollout_log_probs)  # type: ignore[arg-type]
    assert sample.status == status


@pytest.mark.parametrize("arrays", [False, True])
def test_a_character_that_aborts_cut_is_whole_in_the_text(arrays: bool) -> None:
    ids = [*ids_of(TEXT), EOS]
    for first in range(1, len(ids) - 1):
        sample = Sample(prompt="p")
        pieces = [piece(ids[:first], "abort"), piece(ids[first:], "stop")]
        Bench(arrays=arrays).fast(sample, pieces, params())
        assert_whole(sample, ids, Sample.Status.COMPLETED)
        assert sample.response == TEXT


def test_a_character_cut_before_this_call_is_whole_by_either_client() -> None:
    ids = [*ids_of(TEXT), EOS]
    for make in (_by_fast, _by_own):
        for first in range(1, len(ids) - 1):
            sample = partial(ids[:first])
            make(sample, piece(ids[first:], "stop"), params())
            assert_whole(sample, ids, Sample.Status.COMPLETED)
            assert sample.response == TEXT


def _by_fast(sample: Sample, completion: Completion, given: Params) -> None:
    Bench().fast(sample, [completion], given)


def _by_own(sample: Sample, completion: Completion, given: Params) -> None:
    Bench().own(sample, completion, given)


@pytest.mark.parametrize("make", [_by_fast, _by_own])
@pytest.mark.parametrize(
    ("first", "second", "given", "expected", "status"),
    [
        ("abcST", "OPxyz", {"stop": ["STOP"]}, "abcSTOP", "COMPLETED"),
        ("abc1", "23xyz", {"stop_regex": r"\d{3}"}, "abc123", "COMPLETED"),
        ("abc", "defg", {"max_new_tokens": 5}, "abcde", "TRUNCATED"),
        ("abc", "d#fg", {"stop_token_ids": [ord("#")]}, "abcd#", "COMPLETED"),
    ],
)
def test_an_end_over_a_seam_ends_a_sample_in_every_field(
    make: Callable[..., None], first: str, second: str, given: Params, expected: str, status: str
) -> None:
    sample = partial(ids_of(first))
    make(sample, piece(ids_of(second), "length"), params(**given))
    assert_whole(sample, ids_of(expected), Sample.Status[status])
    assert sample.response == expected


@pytest.mark.parametrize("by_own", [False, True])
def test_an_answer_that_is_aborted_at_its_end_is_complete_and_asks_nobody(by_own: bool) -> None:
    ids = [*ids_of("abc"), EOS]
    fresh = Sample(prompt="p", tokens=list(PROMPT))
    if by_own:
        Bench().own(fresh, piece(ids, "abort"), params())
    else:
        Bench().fast(fresh, [piece(ids, "abort")], params())
    assert_whole(fresh, ids, Sample.Status.COMPLETED)
    assert fresh.response == "abc"
    kept = partial(ids)
    asked: list[Any] = (
        Bench().own(kept, piece([], "abort"), params())
        if by_own
        else Bench().fast(kept, [], params()).prompts
    )
    assert asked == []
    assert_whole(kept, ids, Sample.Status.COMPLETED)


def test_without_no_stop_trim_the_text_leaves_out_what_ended_it() -> None:
    sample = Sample(prompt="p")
    pieces = [piece(ids_of("abcST"), "abort"), piece(ids_of("OPx"), "abort")]
    Bench().fast(sample, pieces, params(stop=["STOP"], no_stop_trim=False))
    assert_whole(sample, ids_of("abcSTOP"), Sample.Status.COMPLETED)
    assert sample.response == "abc"


def test_turns_of_a_users_function_keep_the_text_that_it_wrote() -> None:
    sample = partial(ids_of("one"))
    sample.status = Sample.Status.COMPLETED
    sample.response = "what the user made of it: "
    Bench().fast(sample, [piece(ids_of("tw"), "abort"), piece([*ids_of("o"), EOS], "stop")], params())
    assert sample.response == "what the user made of it: two"


@pytest.mark.parametrize(
    ("ids", "given", "mask", "status"),
    [
        ([*ids_of("ab"), EOS], {}, [1, 1, 1], "COMPLETED"),
        (ids_of("abc"), {"max_new_tokens": 3}, [1, 1, 1], "TRUNCATED"),
        (ids_of("abc"), {}, [1, 1, 1], "ABORTED"),
        ([*ids_of("a"), EOS, 5, EOS], {}, [1, 1, 1, 1], "ABORTED"),
        ([*ids_of("a"), 5, EOS], {}, [1, 0, 1], "ABORTED"),
    ],
    ids=str,
)
def test_a_users_answer_that_is_aborted_at_its_end_is_not_continued(
    ids: list[int], given: Params, mask: list[int], status: str
) -> None:
    sample = users(Sample(prompt="p", tokens=list(PROMPT)), ids, "abort", given, mask)
    assert sample.status == Sample.Status[status]


def test_a_users_text_is_whole_where_an_abort_cut_a_character() -> None:
    ids = [*ids_of(TEXT), EOS]
    for first in range(1, len(ids) - 1):
        sample = users(partial(ids[:first]), ids[first:], "stop", {}, [1] * len(ids))
        assert sample.response == TEXT


def users(sample: Sample, ids: list[int], finish: str, given: Params, mask: list[int]) -> Sample:
    """What a user's own function, which posts by itself and joins texts, makes of a sample."""
    completion = piece(ids, finish)

    async def generate(args: Any, sample: Sample, sampling_params: Params) -> Sample:
        answer = json.loads(completion.rest)
        sampling_params["max_new_tokens"] -= sample.response_length
        sample.append_response_tokens(
            args,
            tokens=ids,
            log_probs=[-0.5] * len(ids),
            meta_info=answer["meta_info"],
            text=answer["text"],
        )
        sample.loss_mask = mask
        return sample

    wrapped = whole_function(generate, Bench().whole)
    assert list(inspect.signature(wrapped).parameters) == ["args", "sample", "sampling_params"]
    made: Sample = asyncio.run(wrapped(ARGS, sample, params(**given)))
    return made


def test_replays_end_with_the_sample() -> None:
    def told(array: list[int]) -> str:
        return base64.b64encode(np.array(array, np.int32).tobytes()).decode()

    sample = Sample(prompt="p")
    ids = ids_of("abSTOPxy")
    kept = {
        "top_p_token_ids": told(list(range(16))),
        "top_p_token_offsets": told(list(range(0, 18, 2))),
        "routed_experts": told(list(range(len(PROMPT) + 7))),
    }
    args = SimpleNamespace(**vars(ARGS) | {"rollout_top_p": 0.9})
    bench = Bench()
    sample.tokens = list(PROMPT)
    meta = {"finish_reason": {"type": "abort"}, **kept}
    sample.append_response_tokens(args, tokens=ids, log_probs=[-0.5] * 8, meta_info=meta, text="abSTOPxy")
    before = bench.whole.begin(Sample(prompt="p", tokens=list(PROMPT)), params())
    bench.whole.finish(sample, before, params(), bench.whole.end(sample, before, params(stop="STOP"), seam=0))
    assert_whole(sample, ids_of("abSTOP"), Sample.Status.COMPLETED)
    assert sample.rollout_top_p_token_offsets.tolist() == list(range(0, 14, 2))
    assert sample.rollout_top_p_token_ids.tolist() == list(range(12))
    assert sample.rollout_routed_experts.shape == (len(PROMPT) + 5, 1, 1)


@pytest.mark.parametrize("make", [_by_fast, _by_own])
def test_a_partial_answer_under_a_penalty_begins_anew(make: Callable[..., None]) -> None:
    sample = partial(ids_of("abc"))
    make(sample, piece([*ids_of("xyz"), EOS], "stop"), params(frequency_penalty=0.5))
    assert_whole(sample, [*ids_of("xyz"), EOS], Sample.Status.COMPLETED)
    assert sample.response == "xyz"
