"""What is refused, in which words, and what must never be sent."""

import asyncio
import json
from typing import Any

import pytest

from fa_rollout.client import EnginePool, RequestRefused
from tests.conformance.conformance_kit import CONTEXT, LONG, PROMPT, Http, Target, ask, request
from tests.engines.reference import VOCAB_SIZE

REFUSED = {
    "no ids": ({"input_ids": []}, {}, "input_ids cannot be empty."),
    "no prompt": ({"input_ids": None}, {}, "Either text, input_ids or input_embeds should be provided."),
    "prompt too long": (
        {"input_ids": [5] * CONTEXT},
        {"max_new_tokens": 1},
        f"The input ({CONTEXT} tokens) is longer than the model's context length ({CONTEXT} tokens).",
    ),
    "answer too long": (
        {},
        {"max_new_tokens": CONTEXT},
        f"Requested token count exceeds the model's maximum context length of {CONTEXT} tokens. You "
        f"requested a total of {CONTEXT + len(PROMPT)} tokens: {len(PROMPT)} tokens from the input messages "
        f"and {CONTEXT} tokens for the completion.",
    ),
    "temperature": ({}, {"temperature": -1}, "temperature must be a non-negative finite number, got -1"),
    "top_p": ({}, {"top_p": 0}, "top_p must be in (0, 1], got 0"),
    "length": ({}, {"max_new_tokens": -2}, "max_new_tokens must be at least 0, got -2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_breaks_a_rule_is_refused_in_the_same_words(target: Target, case: str) -> None:
    change, sampling, words = REFUSED[case]
    status, answer = target.with_http(lambda http: http.generate(request("bad", **sampling) | change))
    if (
        target.is_router and case == "length"
    ):  # the router reads it as an unsigned number, and refuses it itself
        assert (status, "expected u32" in answer) == (422, True)
        return
    assert status == 400
    assert answer["error"]["message"].startswith(words)


def test_a_refusal_of_a_stream_is_an_event_under_status_200(target: Target) -> None:
    error, mark = target.with_http(lambda http: http.events(request("bad") | {"input_ids": []}))
    assert mark == b"[DONE]"
    assert json.loads(error)["error"] == {
        "message": "input_ids cannot be empty.",
        "type": "invalid_request_error",
        "code": 400,
        "retryable": False,
    }


@pytest.mark.parametrize("body", [b"{", b'{"input_ids": "x"}', b'{"input_ids": [5, [6]]}'])
def test_a_body_that_cannot_be_read_is_refused_in_a_shape_of_its_own(target: Target, body: bytes) -> None:
    status, answer = target.with_http(lambda http: http.raw_generate(body))
    assert (status, answer["object"], answer["code"]) == (400, "error", 400)
    assert isinstance(answer["message"], str)


def test_an_unknown_key_is_ignored_beside_the_sampling_parameters_and_an_error_among_them(
    target: Target,
) -> None:
    async def work(http: Http) -> None:
        status, _ = await http.generate(request("r", max_new_tokens=1) | {"nonsense": 1})
        assert status == 200
        if not target.is_router:
            status, _ = await http.generate(request("r", max_new_tokens=1, nonsense=1))
            # SGLang 0.5.15 trips over it; later ones refuse it, as the embedded engine does.
            assert status == (500 if target.kind == "sglang" else 400)

    target.with_http(work)


def test_an_id_in_use_is_refused(target: Target) -> None:
    async def work(http: Http) -> None:
        first = asyncio.create_task(http.generate(request("same", **LONG)))
        await asyncio.sleep(0.7)
        status, answer = await http.generate(request("same", max_new_tokens=1))
        assert (status, answer["error"]["message"]) == (400, "Duplicate request ID detected: same")
        await http.control("/abort_request", {"rid": "same"})
        assert (await first)[0] == 200

    target.with_http(work)


def test_the_client_gives_a_refused_request_up_at_once(target: Target) -> None:
    async def work(pool: EnginePool) -> None:
        with pytest.raises(RequestRefused, match="longer than the model's context length"):
            await ask(pool, prompt=[5] * CONTEXT, max_new_tokens=1)
        assert pool.statistics().lanes[0].failures == {"permanent": 1}

    target.with_pool(work)


@pytest.mark.parametrize("ids", [[5, VOCAB_SIZE], [-1, 5]])
def test_the_client_sends_no_id_outside_of_the_vocabulary(target: Target, ids: Any) -> None:
    async def work(pool: EnginePool) -> None:
        with pytest.raises(RequestRefused, match="must lie in"):
            await ask(pool, prompt=ids, max_new_tokens=1)
        assert (await ask(pool, max_new_tokens=1)).finish

    target.with_pool(work)
