"""Answers in bytes become completions that are true, or are refused."""

import base64
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_rollout.client.base.errors import InvalidReply
from fa_rollout.client.wire.decode import _completion, _fast, _plain, decode_reply
from fa_rollout.client.wire.verdict import ServerVerdict
from tests.client.client_kit import body


def test_an_answer_is_decoded_without_the_plain_path() -> None:
    assert _fast(body()) is not None
    completion = decode_reply(body(), engine="e")
    assert completion.output_ids.tolist() == [11, 12]
    assert completion.output_ids.dtype == np.int32
    assert completion.logprobs.tolist() == [-0.5, -0.25]
    assert completion.logprobs.dtype == np.float32
    assert completion.finish == "length"
    assert completion.versions == (("7", 2),)
    assert not completion.has_spans
    assert (completion.prompt_tokens, completion.cached_tokens, completion.e2e_latency_s) == (4, 1, 0.25)
    assert completion.engine == "e"


_LOGPROBS = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False, width=32)
_TOKENS = st.lists(st.tuples(st.integers(0, 2**31 - 1), _LOGPROBS), min_size=1, max_size=40)


@given(tokens=_TOKENS, text=st.text(), separators=st.sampled_from([(",", ":"), (", ", ": ")]))
def test_the_fast_path_says_what_the_plain_path_says(
    tokens: list[tuple[int, float]], text: str, separators: tuple[str, str]
) -> None:
    tree = json.loads(body())
    tree["text"] = text
    tree["output_ids"] = [token for token, _ in tokens]
    tree["meta_info"]["completion_tokens"] = len(tokens)
    tree["meta_info"]["output_token_logprobs"] = [[value, token, None] for token, value in tokens]
    raw = json.dumps(tree, separators=separators).encode()
    fast = _fast(raw)
    assert fast is not None
    fast_completion, plain = _completion(fast, ""), _completion(_plain(raw), "")
    np.testing.assert_array_equal(fast_completion.output_ids, plain.output_ids)
    np.testing.assert_array_equal(fast_completion.logprobs, plain.logprobs)
    assert fast_completion.versions == plain.versions


@pytest.mark.parametrize(
    "text", ['"output_ids":[7]', '{"output_token_logprobs":[[-1.0,3,null]]}', '\\"output_ids\\":[9]', "]]}"]
)
def test_text_that_looks_like_a_key_is_text(text: str) -> None:
    completion = decode_reply(body(text=text))
    assert completion.output_ids.tolist() == [11, 12]
    assert completion.logprobs.tolist() == [-0.5, -0.25]


def test_ids_are_taken_from_the_log_probabilities_when_the_engine_lists_none() -> None:
    tree = json.loads(body())
    del tree["output_ids"]
    assert decode_reply(json.dumps(tree).encode()).output_ids.tolist() == [11, 12]


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-7, -1e-30])
def test_zero_of_either_sign_and_a_rounding_above_it_are_legal(value: float) -> None:
    completion = decode_reply(body(meta={"output_token_logprobs": [[value, 11, None], [-1.0, 12, None]]}))
    assert completion.logprobs[0] == np.float32(value)
    assert math.copysign(1.0, completion.logprobs[0]) == math.copysign(1.0, value)


@pytest.mark.parametrize(
    ("value", "found"), [(None, "null"), (math.nan, "nan"), (-math.inf, "-inf"), (0.01, "0.01"), ("x", "'x'")]
)
def test_a_log_probability_that_is_none_is_refused_with_its_place(value: Any, found: str) -> None:
    tree = json.loads(body(meta={"output_token_logprobs": [[-0.5, 11, None], [-0.5, 12, None]]}))
    tree["meta_info"]["output_token_logprobs"][1][0] = value
    with pytest.raises(InvalidReply, match=rf"found {found} at output token 1 of 2 \(engine e\)"):
        decode_reply(json.dumps(tree).encode(), engine="e")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"meta": {"output_token_logprobs": [[-0.5, 11, None]]}}, "found 1 items"),
        ({"meta": {"output_token_logprobs": None}}, "found none"),
        ({"meta": {"output_token_logprobs": [[-0.5, 11, None], [-0.5, 13, None]]}}, "must be for id 12"),
        ({"output_ids": [11]}, "found 2 items"),
        ({"output_ids": [11, -1]}, "whole numbers"),
        ({"output_ids": [11, 2**31]}, "whole numbers"),
        ({"output_ids": [11, 2**32 + 12]}, "whole numbers"),
        ({"output_ids": [11, 2**80]}, "whole numbers"),
        ({"output_ids": [11, 1.5]}, "whole numbers"),
        ({"meta": {"output_token_logprobs": [[-0.5, 11], [None, -0.25, 12, None]]}}, "must be for id 12"),
        (
            {"meta": {"output_token_logprobs": [[-0.5, 11, None], [-0.5, 12, None, None]]}},
            "must be for id 12",
        ),
        ({"meta": {"output_token_logprobs": [[-0.5, 11, None, -0.5], [12, None]]}}, "must be for id 11"),
        ({"meta": {"output_token_logprobs": [[-0.5, 11, None], [-0.5, True, None]]}}, "must be for id 12"),
        ({"meta": {"output_token_logprobs": [[-(10**400), 11, None], [-0.5, 12, None]]}}, "must be finite"),
        ({"meta": {"output_token_logprobs": [-0.5, 11]}}, "must be for id 11"),
        ({"output_ids": "11"}, "list of token ids"),
        ({"meta": {"finish_reason": None}}, "finish_reason"),
        ({"meta": {"finish_reason": {"type": "error"}}}, "stop, length or abort"),
        ({"meta": {"prompt_tokens": "four"}}, "unknown form"),
        ({"meta": {"completion_tokens": 3}}, "all of its 3 completion_tokens, found 2 ids"),
        ({"meta": {"completion_tokens": 1}}, "all of its 1 completion_tokens, found 2 ids"),
        (
            {"meta": {"completion_tokens": None, "finish_reason": {"type": "stop", "matched": 9}}},
            "stopped by token 9 must end with it",
        ),
    ],
)
def test_an_answer_in_conflict_with_itself_is_refused(changes: dict[str, Any], reason: str) -> None:
    tree = json.loads(body())
    tree["meta_info"] |= changes.get("meta", {})
    tree |= {key: value for key, value in changes.items() if key != "meta"}
    with pytest.raises(InvalidReply, match=reason):
        decode_reply(json.dumps(tree).encode())


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'{"text":"x"}', body()[:-20], b"[" + body() + b"]", b"[" * 100_000, b"\xff"]
)
def test_what_is_no_answer_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidReply, match="an answer must be"):
        decode_reply(raw)


def test_an_answer_nested_without_end_is_refused_though_its_tokens_are_there() -> None:
    raw = body(meta={"more": 1}).replace(b'"more":1', b'"more":' + b"[" * 100_000 + b"]" * 100_000)
    with pytest.raises(InvalidReply, match="recursion depth"):
        decode_reply(raw)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b'{"error":{"message":"why","code":429}}', 429),
        (b'{"object":"error","message":"why","type":"503","param":null,"code":503}', 503),
        (b'{"error":{"message":"why","code":"400"}}', 400),
    ],
)
def test_an_error_in_place_of_an_answer_is_its_verdict(raw: bytes, status: int) -> None:
    with pytest.raises(ServerVerdict, match="why") as caught:
        decode_reply(raw)
    assert caught.value.status == status


def test_an_abort_may_lack_every_list() -> None:
    raw = b'{"text":"","meta_info":{"id":"r","finish_reason":{"type":"abort"},"prompt_tokens":0}}'
    assert decode_reply(raw).finish == "abort"


@pytest.mark.parametrize("keys", [{}, {"output_token_logprobs": []}])
def test_an_abort_without_a_token_is_an_answer(keys: dict[str, Any]) -> None:
    finish = {"type": "abort", "message": "Abort in waiting queue", "status_code": None, "err_type": None}
    meta = {"id": "r", "finish_reason": finish, "weight_version": "7", "completion_tokens": 0, **keys}
    raw = json.dumps({"text": "", "output_ids": [], "meta_info": meta}).encode()
    completion = decode_reply(raw)
    assert completion.finish == "abort"
    assert len(completion.output_ids) == len(completion.logprobs) == 0
    assert completion.versions == ()
    assert completion.prompt_tokens is None


def _with_spans(*spans: tuple[Any, int, int], finish: str = "length") -> bytes:
    versions = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    return body(meta={"weight_versions": versions, "finish_reason": {"type": finish}})


def test_each_token_keeps_the_version_that_sampled_it() -> None:
    completion = decode_reply(_with_spans(("3", 0, 1), ("4", 1, 2)))
    assert completion.versions == (("3", 1), ("4", 2))
    assert completion.has_spans


def test_a_version_that_is_no_unicode_is_told_in_words_that_are() -> None:
    raw = body(meta={"weight_version": "?"}).replace(b'"?"', b'"\\ud800"')
    assert decode_reply(raw).versions == (("'\\ud800'", 2),)


def test_a_version_that_the_engine_does_not_tell_is_none() -> None:
    assert decode_reply(body(meta={"weight_version": None})).versions == ((None, 2),)
    assert decode_reply(_with_spans((None, 0, 2))).versions == ((None, 2),)


@pytest.mark.parametrize(
    "spans", [(("3", 0, 1),), (("3", 0, 1), ("4", 2, 3)), (("3", 1, 2),), (("3", 0, 3),), (("3", 0, -1),)]
)
def test_spans_that_do_not_cover_the_tokens_are_refused(spans: tuple[tuple[str, int, int], ...]) -> None:
    with pytest.raises(InvalidReply, match="version spans must"):
        decode_reply(_with_spans(*spans))


def test_spans_of_an_answer_cut_short_in_the_queue_are_cut_with_it() -> None:
    completion = decode_reply(_with_spans(("3", 0, 1), ("4", 1, 7), ("5", 7, 9), finish="abort"))
    assert completion.versions == (("3", 1), ("4", 2))


def test_the_stop_token_is_kept_as_the_engine_gave_it() -> None:
    completion = decode_reply(body(meta={"finish_reason": {"type": "stop", "matched": 12}}))
    assert completion.output_ids[-1] == completion.matched == 12
    assert len(completion.logprobs) == 2


def test_an_answer_aborted_in_the_queue_may_have_lost_its_end() -> None:
    aborted = body(meta={"finish_reason": {"type": "abort"}, "completion_tokens": 3})
    assert decode_reply(aborted).output_ids.tolist() == [11, 12]


def test_routed_experts_come_as_one_row_per_token_but_the_last() -> None:
    experts = np.arange(5 * 6, dtype=np.int32)
    raw = body(meta={"routed_experts": base64.b64encode(experts.tobytes()).decode()})
    np.testing.assert_array_equal(decode_reply(raw).extra["routed_experts"], experts.reshape(5, 6))
    short = body(meta={"routed_experts": base64.b64encode(experts[:-1].tobytes()).decode()})
    with pytest.raises(InvalidReply, match="a row per token"):
        decode_reply(short)
