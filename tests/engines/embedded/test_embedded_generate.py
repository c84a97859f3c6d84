"""What `/generate` answers, over HTTP."""

import asyncio
import itertools
from typing import Any

import pytest
from embedded_client import Client, connect, output_logprobs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fa_rollout.engines.embedded.model.incremental_text import IncrementalText
from fa_rollout.engines.tiny_model import BOS_ID, EOS_ID
from tests.engines.reference import CHARACTERS, VOCAB_SIZE, reference_logprobs
from tests.kit.embedded import EmbeddedEngine

GREEDY = {"temperature": 0.0}


def encode(text: str) -> list[int]:
    return [BOS_ID, *(3 + CHARACTERS.index(character) for character in text)]


def decode(ids: list[int]) -> str:
    return "".join(CHARACTERS[token_id - 3] for token_id in ids if token_id >= 3)


def ask(engine: EmbeddedEngine, **body: Any) -> Any:
    async def scene() -> Any:
        async with connect(engine.url) as client:
            return await client.generate(**body)

    return asyncio.run(scene())


def refusal(engine: EmbeddedEngine, body: Any, *, status: int = 400) -> Any:
    async def scene() -> Any:
        async with connect(engine.url) as client:
            found, reply = await client.call("/generate", body)
            assert found == status
            return reply

    return asyncio.run(scene())


def test_a_reply_has_sglangs_layout(shared_engine: EmbeddedEngine, reference: Any) -> None:
    params = {"max_new_tokens": 6, "ignore_eos": True}
    reply = ask(shared_engine, text="12+3=", rid="one", sampling_params=params, return_logprob=True)
    assert reply["text"] == decode(reply["output_ids"])
    meta = reply["meta_info"]
    assert meta["id"] == "one"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (6, 6, 0)
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 6}]
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs_length"] == 6
    assert all(item[2] is None for item in meta["output_token_logprobs"])
    assert meta["e2e_latency"] > 0
    expected = reference_logprobs(reference, encode("12+3="), reply["output_ids"])
    assert output_logprobs(reply) == pytest.approx(expected, abs=1e-4)


def test_prompt_logprobs_begin_with_a_null_item_and_can_carry_text(shared_engine: EmbeddedEngine) -> None:
    reply = ask(
        shared_engine,
        input_ids=encode("1+1="),
        sampling_params={"max_new_tokens": 2, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = reply["meta_info"]
    assert [item[1:] for item in meta["input_token_logprobs"]] == [
        [token_id, text] for token_id, text in zip(encode("1+1=")[1:], "1+1=", strict=True)
    ]
    assert [item[0] is None for item in meta["input_token_logprobs"]] == [True, False, False, False]
    assert meta["input_top_logprobs"][0] is None
    assert [len(entries) for entries in meta["input_top_logprobs"][1:]] == [2, 2, 2]
    assert [len(entries) for entries in meta["output_top_logprobs"]] == [2, 2]


def test_zero_new_tokens_score_the_prompt(shared_engine: EmbeddedEngine, reference: Any) -> None:
    prompt = encode("12345")
    reply = ask(
        shared_engine,
        input_ids=prompt,
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    assert reply["output_ids"] == []
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    found = [item[0] for item in reply["meta_info"]["input_token_logprobs"]]
    assert found[0] is None
    assert found[1:] == pytest.approx(reference_logprobs(reference, prompt[:1], prompt[1:]), abs=1e-4)


def test_batches_and_samples_come_back_prompt_major(shared_engine: EmbeddedEngine) -> None:
    prompts = ["1", "22", "333"]
    params = {"max_new_tokens": 3, "ignore_eos": True}
    batch = ask(shared_engine, text=prompts, rid="b", sampling_params=params)
    assert [reply["meta_info"]["id"] for reply in batch] == ["b_0", "b_1", "b_2"]
    assert [reply["meta_info"]["prompt_tokens"] for reply in batch] == [2, 3, 4]
    samples = ask(shared_engine, text=prompts, rid="b", sampling_params=params | {"n": 2})
    assert [reply["meta_info"]["prompt_tokens"] for reply in samples] == [2, 2, 3, 3, 4, 4]
    assert len({reply["meta_info"]["id"] for reply in samples}) == 6
    each = ask(
        shared_engine,
        text=prompts,
        rid=["x", "y", "z"],
        sampling_params=[params | {"max_new_tokens": num} for num in (1, 2, 3)],
        return_logprob=[True, False, True],
    )
    assert [reply["meta_info"]["completion_tokens"] for reply in each] == [1, 2, 3]
    assert ["output_token_logprobs" in reply["meta_info"] for reply in each] == [True, False, True]


def test_a_seed_gives_the_same_tokens_in_any_company(shared_engine: EmbeddedEngine) -> None:
    async def scene() -> None:
        params = {"max_new_tokens": 40, "ignore_eos": True}
        async with connect(shared_engine.url) as client:

            async def seeded(seed: int) -> list[int]:
                reply = await client.generate(text="1+2=", sampling_params=params | {"sampling_seed": seed})
                return reply["output_ids"]

            alone = [await seeded(seed) for seed in (5, -5, 2**40)]
            company = [client.generate(text="7" * num, sampling_params=params) for num in range(1, 30)]
            together, *_ = await asyncio.gather(
                asyncio.gather(*(seeded(seed) for seed in (5, -5, 2**40))), *company
            )
            assert together == alone
            assert len({tuple(ids) for ids in alone}) == 3
            free = [
                (await client.generate(text="1+2=", sampling_params=params))["output_ids"] for _ in range(3)
            ]
            assert len({tuple(ids) for ids in free}) == 3

    asyncio.run(scene())


def test_samples_of_one_seed_differ_and_the_first_is_that_of_n_one(shared_engine: EmbeddedEngine) -> None:
    params = {"max_new_tokens": 20, "ignore_eos": True, "sampling_seed": 3}
    single = ask(shared_engine, text="1", sampling_params=params)
    several = ask(shared_engine, text="1", sampling_params=params | {"n": 4})
    assert several[0]["output_ids"] == single["output_ids"]
    assert len({tuple(reply["output_ids"]) for reply in several}) == 4


def test_a_seeded_completion_can_be_continued_from_its_tokens(shared_engine: EmbeddedEngine) -> None:
    params = {"ignore_eos": True, "sampling_seed": 11}
    whole = ask(shared_engine, input_ids=encode("12"), sampling_params=params | {"max_new_tokens": 20})[
        "output_ids"
    ]
    rest = ask(
        shared_engine,
        input_ids=encode("12") + whole[:8],
        sampling_params=params | {"max_new_tokens": 12},
    )["output_ids"]
    assert whole[:8] + rest == whole


def greedy(engine: EmbeddedEngine, **params: Any) -> Any:
    return ask(
        engine, text="12+3=", sampling_params=GREEDY | {"max_new_tokens": 30} | params, return_logprob=True
    )


def endless(engine: EmbeddedEngine, **params: Any) -> Any:
    return greedy(engine, logit_bias={str(EOS_ID): -100.0}, **params)


def test_stop_ids_and_strings_end_the_text_and_keep_their_tokens(shared_engine: EmbeddedEngine) -> None:
    free = endless(shared_engine)["output_ids"]
    cut = next(index for index in range(2, 30) if free[index] not in free[:index] and free[index] >= 3)
    by_id = endless(shared_engine, stop_token_ids=[free[cut]])
    assert by_id["output_ids"] == free[: cut + 1]
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": free[cut]}
    assert by_id["text"] == decode(free[:cut])
    assert len(output_logprobs(by_id)) == cut + 1
    untrimmed = endless(shared_engine, stop_token_ids=[free[cut]], no_stop_trim=True)
    assert untrimmed["text"] == decode(free[: cut + 1])
    string = decode(free[cut - 1 : cut + 1])
    by_string = endless(shared_engine, stop=["never seen", string])
    assert by_string["output_ids"] == free[: cut + 1]
    assert by_string["meta_info"]["finish_reason"] == {"type": "stop", "matched": string}
    assert by_string["text"] == decode(free)[: decode(free).index(string)]
    assert endless(shared_engine, stop=string, no_stop_trim=True)["text"] == decode(free[: cut + 1])


def test_end_of_sequence_stops_unless_it_is_ignored_or_too_early(shared_engine: EmbeddedEngine) -> None:
    bias = {"logit_bias": {str(EOS_ID): 100.0}}
    reply = greedy(shared_engine, **bias)
    assert reply["output_ids"] == [EOS_ID]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS_ID}
    assert reply["text"] == ""
    assert greedy(shared_engine, **bias, ignore_eos=True)["output_ids"] == [EOS_ID] * 30
    late = greedy(shared_engine, **bias, min_new_tokens=5)["output_ids"]
    assert len(late) == 6
    assert EOS_ID not in late[:5]
    assert greedy(shared_engine, **bias, max_new_tokens=1)["meta_info"]["finish_reason"]["type"] == "stop"


def test_null_new_tokens_go_to_the_end_of_the_context(shared_engine: EmbeddedEngine) -> None:
    prompt = [4] * 4080
    reply = ask(shared_engine, input_ids=prompt, sampling_params={"max_new_tokens": None, "ignore_eos": True})
    assert len(reply["output_ids"]) == 16


def test_a_stream_is_cumulative_and_ends_as_the_plain_reply(shared_engine: EmbeddedEngine) -> None:
    async def scene() -> None:
        body = {
            "text": "12+3=",
            "return_logprob": True,
            "sampling_params": GREEDY | {"max_new_tokens": 60, "ignore_eos": True, "stop": ["no such text"]},
        }
        async with connect(shared_engine.url) as client:
            plain = await client.generate(**body)
            chunks = [chunk async for chunk in client.stream(**body)]
        assert len(chunks) > 5
        for before, after in itertools.pairwise(chunks):
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
            assert after["text"].startswith(before["text"])
        for chunk in chunks[:-1]:
            assert chunk["meta_info"]["finish_reason"] is None
            assert chunk["text"] == decode(chunk["output_ids"])
            assert output_logprobs(chunk) == output_logprobs(plain)[: len(chunk["output_ids"])]
            assert chunk["meta_info"]["weight_versions"][0]["end"] == len(chunk["output_ids"])
        for key in ("text", "output_ids"):
            assert chunks[-1][key] == plain[key]
        assert chunks[-1]["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]

    asyncio.run(scene())


def test_a_streamed_batch_tells_the_index(shared_engine: EmbeddedEngine) -> None:
    async def scene() -> None:
        async with connect(shared_engine.url) as client:
            params = {"max_new_tokens": 4, "ignore_eos": True}
            last: dict[int, Any] = {}
            async for chunk in client.stream(text=["1", "22"], sampling_params=params):
                last[chunk["index"]] = chunk
            assert [len(last[index]["output_ids"]) for index in (0, 1)] == [4, 4]
            assert [last[index]["meta_info"]["prompt_tokens"] for index in (0, 1)] == [2, 3]

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({"text": []}, "text cannot be empty."),
        ({"input_ids": [[1], []]}, "input_ids cannot be empty."),
        ({"input_ids": [1, VOCAB_SIZE]}, f"input_ids must be in [0, {VOCAB_SIZE - 1}]"),
        ({"input_ids": [-1]}, "input_ids must be in"),
        ({"text": "Z"}, "text must be made of the tokenizer's vocabulary"),
        (
            {"input_ids": [1] * 4096},
            "The input (4096 tokens) is longer than the model's context length (4096 tokens).",
        ),
        ({"input_ids": [1] * 4000}, "Requested token count exceeds the model's maximum context length"),
        (
            {"input_ids": [1], "sampling_params": {"temperature": -1.0}},
            "temperature must be a non-negative finite",
        ),
        ({"input_ids": [1], "sampling_params": {"top_p": 0.0}}, "top_p must be in (0, 1], got 0."),
        ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k must be -1 (disable) or at least 1"),
        ({"input_ids": [1], "sampling_params": {"n": 0}}, "n must be at least 1"),
        ({"input_ids": [1], "sampling_params": {"regex": "a"}}, "regex is not supported"),
        ({"input_ids": [1], "sampling_params": {"logit_bias": {"99": 1.0}}}, "logit_bias must map token ids"),
        ({"input_ids": [1], "session_params": {"id": "s"}}, "session_params is not supported"),
        (
            {"input_ids": [1], "return_logprob": True, "logprob_start_len": 2},
            "logprob_start_len must be -1 or in",
        ),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "The length of rid should be equal to the batch size 2"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "must differ"),
    ],
)
def test_bad_requests_are_refused_in_sglangs_shape(
    shared_engine: EmbeddedEngine, body: Any, message: str
) -> None:
    assert message in refusal(shared_engine, body)["error"]["message"]


def test_unknown_sampling_keys_and_wrong_types_have_shapes_of_their_own(
    shared_engine: EmbeddedEngine,
) -> None:
    unknown = refusal(shared_engine, {"input_ids": [1], "sampling_params": {"foo": 1}})
    assert unknown["error"].startswith("unknown field `foo`, expected one of")
    wrong = refusal(shared_engine, {"input_ids": "1", "sampling_params": {}})
    assert wrong["object"] == "error"
    assert ask(shared_engine, input_ids=[1], not_a_key=1, sampling_params={"max_new_tokens": 1})["output_ids"]


def test_a_refused_stream_is_an_event(shared_engine: EmbeddedEngine) -> None:
    async def scene() -> None:
        async with connect(shared_engine.url) as client:
            (chunk,) = [chunk async for chunk in client.stream(input_ids=[])]
            assert chunk["error"]["code"] == 400
            assert chunk["error"]["message"] == "input_ids cannot be empty."

    asyncio.run(scene())


def test_a_rid_is_live_once(shared_engine: EmbeddedEngine) -> None:
    async def scene() -> None:
        async with connect(shared_engine.url) as client:
            long = {"max_new_tokens": 4000, "ignore_eos": True}
            stream = client.stream(text="1", rid="dd", sampling_params=long)
            await anext(stream)
            status, reply = await client.call("/generate", {"text": "1", "rid": "dd"})
            assert (status, reply["error"]["message"]) == (400, "Duplicate request ID detected: dd")
            await client.post("/abort_request", rid="dd")
            async for _ in stream:
                pass
            await client.generate(text="1", rid="dd", sampling_params={"max_new_tokens": 1})

    asyncio.run(scene())


def test_the_server_tells_about_itself(shared_engine: EmbeddedEngine) -> None:
    async def scene(client: Client) -> None:
        for path in ("/health", "/health_generate", "/ready", "/ping"):
            assert (await client.call(path))[0] == 200
        for path in ("/model_info", "/get_model_info"):
            _, info = await client.call(path)
            assert (info["weight_version"], info["vocab_size"]) == ("default", VOCAB_SIZE)
        for path in ("/server_info", "/get_server_info"):
            _, info = await client.call(path)
            assert info["context_length"] == 4096
        _, loads = await client.call("/v1/loads")
        assert loads["loads"][0]["num_running_reqs"] == 0
        _, load = await client.call("/get_load")
        assert load[0]["num_reqs"] == 0
        _, models = await client.call("/v1/models")
        assert models["data"][0]["max_model_len"] == 4096

    async def scenes() -> None:
        async with connect(shared_engine.url) as client:
            await scene(client)

    asyncio.run(scenes())


def test_text_that_grows_token_by_token_is_the_text_of_all_tokens() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = "a é 漢字 😀 end"
    incremental = IncrementalText(tokenizer, skip_special_tokens=True)
    pieces = [incremental.push(token_id) for token_id in tokenizer.encode(text).ids]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
