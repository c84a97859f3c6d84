"""Requests and their answers: ids, log-probs, ends, layouts."""

import asyncio
import json
import time
from typing import Any

import numpy as np
import pytest

from fa_rollout.client import Completion, EnginePool
from fa_rollout.engines.tiny_model import EOS_ID
from tests.conformance.conformance_kit import (
    PROMPT,
    TOLERANCE,
    Http,
    Target,
    ask,
    assert_sampled_by,
    request,
)
from tests.engines.reference import CHARACTERS, VOCAB_SIZE, logprobs_RV

GREEDY = {"temperature": 0.0, "ignore_eos": True}
KEYS = [
    "id",
    "finish_reason",
    "prompt_tokens",
    "weight_version",
    "num_retractions",
    "reasoning_tokens",
    "completion_tokens",
    "cached_tokens",
    "cached_tokens_details",
    "dp_rank",
    "e2e_latency",
    "response_sent_to_client_ts",
]
LOGPROB_KEYS = ["input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"]


def greedy(target: Target, num_tokens: int = 24, **sampling: Any) -> Completion:
    return target.with_pool(lambda pool: ask(pool, max_new_tokens=num_tokens, **(GREEDY | sampling)))


def text_of(ids: Any) -> str:
    return "".join(CHARACTERS[i - 3] for i in ids if i >= 3)


def test_a_probe_finds_model_version_and_age(target: Target) -> None:
    async def work(pool: EnginePool) -> None:
        (info,) = pool.engines
        assert info.url == target.engine_url
        assert info.version_label == "default"
        assert info.has_spans is target.has_spans
        assert (info.model_path, info.vocab_size) == (str(target.model), VOCAB_SIZE)
        assert info.server_version
        assert await pool.weights.versions() == {target.engine_url: "default"}

    target.with_pool(work)


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_log_probs_are_those_of_a_forward_pass_at_the_temperature_before_any_cut(
    target: Target, model: Any, cut: dict[str, Any]
) -> None:
    async def work(pool: EnginePool) -> list[Completion]:
        sampling = {"temperature": 0.8, "max_new_tokens": 40, "ignore_eos": True} | cut
        return await asyncio.gather(*(ask(pool, f"r{i}", **sampling) for i in range(12)))

    completions = target.with_pool(work)
    for completion in completions:
        assert (completion.finish, len(completion.output_ids)) == ("length", 40)
        assert completion.prompt_tokens == len(PROMPT)
        assert completion.versions == (("default", 40),)
        assert completion.has_spans is target.has_spans
        assert_sampled_by(model, completion, temperature=0.8)
    assert len({completion.output_ids.tobytes() for completion in completions}) > 1


def test_greedy_takes_the_most_likely_token_and_tells_its_log_prob_at_temperature_one(
    target: Target, model: Any
) -> None:
    completion = greedy(target)
    best = logprobs_RV(model, PROMPT, completion.output_ids.tolist()).numpy().max(-1)
    np.testing.assert_allclose(completion.logprobs, best, atol=TOLERANCE, rtol=0)


def test_a_stop_id_ends_the_answer_and_stays_in_it(target: Target, model: Any) -> None:
    ids = greedy(target).output_ids.tolist()
    stop = next(token for token in ids[2:] if token not in ids[:2])
    completion = greedy(target, stop_token_ids=[stop], ignore_eos=False)
    assert (completion.finish, completion.matched) == ("stop", stop)
    assert completion.output_ids.tolist() == ids[: ids.index(stop) + 1]
    assert_sampled_by(model, completion)


def test_a_stop_text_ends_the_answer_and_its_tokens_stay_in_it(target: Target, model: Any) -> None:
    ids = greedy(target).output_ids.tolist()
    at = next(i for i in range(3, len(ids)) if min(ids[i - 1 : i + 1]) >= 3)
    stop = text_of(ids[at - 1 : at + 1])
    completion = greedy(target, stop=[stop])
    assert (completion.finish, completion.matched) == ("stop", stop)
    assert text_of(completion.output_ids).endswith(stop)
    assert completion.output_ids.tolist() == ids[: len(completion.output_ids)]
    assert_sampled_by(model, completion)


def test_the_end_token_ends_an_answer_unless_it_is_ignored(target: Target, model: Any) -> None:
    wild = {"temperature": 4.0, "max_new_tokens": 400}
    ended = target.with_pool(lambda pool: ask(pool, **wild))
    assert (ended.finish, ended.matched) == ("stop", EOS_ID)
    assert ended.output_ids.tolist().index(EOS_ID) == len(ended.output_ids) - 1
    assert_sampled_by(model, ended, temperature=4.0)
    ignored = target.with_pool(lambda pool: ask(pool, ignore_eos=True, **wild))
    assert (ignored.finish, len(ignored.output_ids)) == ("length", 400)
    assert EOS_ID in ignored.output_ids


def test_an_answer_has_sglangs_keys_and_no_other(target: Target) -> None:
    status, answer = target.with_http(
        lambda http: http.generate(request("r", max_new_tokens=5, ignore_eos=True))
    )
    assert status == 200
    meta = answer["meta_info"]
    assert set(answer) == {"text", "output_ids", "meta_info"}
    assert set(meta) - {"weight_versions"} == {*KEYS, *LOGPROB_KEYS}
    assert ("weight_versions" in meta) is target.has_spans
    assert answer["text"] == text_of(answer["output_ids"])
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("r", len(PROMPT), 5)
    assert (meta["input_token_logprobs"], meta["output_token_logprobs_length"]) == ([], 5)
    for (logprob, token, text), token_id in zip(
        meta["output_token_logprobs"], answer["output_ids"], strict=True
    ):
        assert (token, text) == (token_id, None)
        assert logprob < 0


def test_the_text_of_a_stop_is_trimmed_unless_asked_otherwise(target: Target) -> None:
    ids = greedy(target).output_ids.tolist()
    stop = next(token for token in ids[1:] if token != ids[0] and token >= 3)
    kept = ids[: ids.index(stop) + 1]
    sampling = {**GREEDY, "max_new_tokens": 24, "ignore_eos": False, "stop_token_ids": [stop]}
    for no_stop_trim, shown in ((False, kept[:-1]), (True, kept)):
        body = request("r", **sampling, no_stop_trim=no_stop_trim)
        _, answer = target.with_http(lambda http, body=body: http.generate(body))
        assert (answer["text"], answer["output_ids"]) == (text_of(shown), kept)


@pytest.mark.parametrize("num_new", [0, 4])
def test_prompt_log_probs_begin_with_null_and_need_no_new_token(
    target: Target, model: Any, num_new: int
) -> None:
    body = request("r", max_new_tokens=num_new, ignore_eos=True) | {
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }
    _, answer = target.with_http(lambda http: http.generate(body))
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": num_new}
    assert meta["input_token_logprobs"][0] == [None, PROMPT[0], None]
    assert [item[1] for item in meta["input_token_logprobs"]] == PROMPT
    table = logprobs_RV(model, PROMPT[:1], PROMPT[1:]).numpy()
    found = [item[0] for item in meta["input_token_logprobs"][1:]]
    expected = table[np.arange(len(PROMPT) - 1), PROMPT[1:]]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)
    assert meta["input_top_logprobs"][0] is None
    best = [[item[0] for item in top] for top in meta["input_top_logprobs"][1:]]
    np.testing.assert_allclose(best, -np.sort(-table)[:, :2], atol=TOLERANCE, rtol=0)
    if num_new:  # SGLang tells an entry for a token that it did not make
        assert [len(top) for top in meta["output_top_logprobs"]] == [2] * num_new


def test_a_batch_comes_back_prompt_by_prompt_under_numbered_ids(target: Target) -> None:
    body = {"rid": "b", "input_ids": [[5, 6], [7, 8, 9]], "sampling_params": {"max_new_tokens": 2}}
    _, answers = target.with_http(lambda http: http.generate(body))
    assert [answer["meta_info"]["id"] for answer in answers] == ["b_0", "b_1"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [2, 3]


def test_several_samples_of_a_prompt_come_back_prompt_by_prompt_under_fresh_ids(target: Target) -> None:
    sampling = {"max_new_tokens": 12, "n": 2, "ignore_eos": True}
    rid = f"b{time.monotonic_ns()}"  # with n > 1 SGLang never forgets it, and refuses it a second time
    body = {"rid": rid, "input_ids": [[5, 6], [7, 8, 9]], "sampling_params": sampling}
    _, answers = target.with_http(lambda http: http.generate(body))
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [2, 2, 3, 3]
    assert len({answer["meta_info"]["id"] for answer in answers} - {rid, f"{rid}_0", f"{rid}_1"}) == 4
    assert answers[0]["output_ids"] != answers[1]["output_ids"]


def test_a_stream_is_cumulative_and_ends_with_a_mark(target: Target) -> None:
    body = request("r", max_new_tokens=20, **GREEDY)
    *events, mark = target.with_http(lambda http: http.events(body))
    assert mark == b"[DONE]"
    answers = [json.loads(event) for event in events]
    last = answers[-1]
    assert [answer["meta_info"]["finish_reason"] for answer in answers[:-1]] == [None] * (len(answers) - 1)
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 20}
    for answer in answers:
        count = len(answer["output_ids"])
        assert answer["output_ids"] == last["output_ids"][:count]
        assert len(answer["meta_info"]["output_token_logprobs"]) == count
        assert last["text"].startswith(answer["text"])


def test_an_answer_can_be_continued_from_its_tokens(target: Target, model: Any) -> None:
    async def work(http: Http) -> Any:
        body = request("r", max_new_tokens=10, **GREEDY)
        _, first = await http.generate(body)
        _, rest = await http.generate(body | {"input_ids": PROMPT + first["output_ids"]})
        return first["output_ids"] + rest["output_ids"]

    assert target.with_http(work) == greedy(target, 20).output_ids.tolist()
