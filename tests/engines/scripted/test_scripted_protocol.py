"""The scripted engine has SGLang's ways, those that surprise most of all."""

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest

from tests.engines.scripted.scripted_kit import PROMPT, Plain, request, run_with
from tests.kit.scripted import EOS_ID, Lengths, Rule, Script, ScriptedEngine

SLOW = Script(tokens_per_s=400.0, lengths=Lengths(tokens=200))


def start(**settings: Any) -> ScriptedEngine:
    return ScriptedEngine.start(SLOW, **settings)


def meta(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["meta_info"]
    return found


def test_an_answer_has_the_keys_of_sglang() -> None:
    with start(tokens_per_s=0.0) as engine:
        answer = run_with(engine, lambda plain: plain.generate("r"))
        assert len(answer["output_ids"]) == 200
        assert answer["output_ids"][-1] == EOS_ID
        found = meta(answer)
        assert found["id"] == "r"
        assert found["finish_reason"] == {"type": "stop", "matched": EOS_ID}
        assert (found["prompt_tokens"], found["completion_tokens"]) == (len(PROMPT), 200)
        assert found["weight_version"] == "default"
        assert found["weight_versions"] == [{"version": "default", "start": 0, "end": 200}]
        assert [item[1] for item in found["output_token_logprobs"]] == answer["output_ids"]
        assert {item[2] for item in found["output_token_logprobs"]} == {None}


def test_max_new_tokens_cuts_with_finish_length() -> None:
    with start(tokens_per_s=0.0) as engine:
        answer = run_with(engine, lambda plain: plain.generate("r", max_new_tokens=12))
        assert meta(answer)["finish_reason"] == {"type": "length", "length": 12}
        assert len(answer["output_ids"]) == 12


def test_an_abort_ends_every_id_that_begins_with_it_but_only_if_it_is_known() -> None:
    with start() as engine:

        async def work(plain: Plain) -> None:
            calls = {rid: plain.begin(rid) for rid in ("r1", "r10", "r2")}
            await plain.state(num_running=3)
            for unknown in ("r", ""):
                assert await plain.post("/abort_request", {"rid": unknown}) == (200, "")
            await plain.post("/abort_request", {"rid": "r1"})
            ends = {rid: meta(await call)["finish_reason"]["type"] for rid, call in calls.items()}
            assert ends == {"r1": "abort", "r10": "abort", "r2": "stop"}

        run_with(engine, work)


def test_with_n_above_one_an_abort_by_the_original_id_does_nothing() -> None:
    with start() as engine:

        async def work(plain: Plain) -> None:
            call = asyncio.create_task(plain.post("/generate", request("r", n=3)))
            await plain.state(num_running=3)
            await plain.post("/abort_request", {"rid": "r"})
            _, answers = await call
            assert [meta(a)["finish_reason"]["type"] for a in answers] == ["stop"] * 3
            assert "r" not in {meta(a)["id"] for a in answers}

        run_with(engine, work)


def test_an_abort_in_the_queue_leaves_out_counts_and_cuts_to_fifty() -> None:
    with start(max_running=1) as engine:

        async def work(plain: Plain) -> None:
            running, waiting = plain.begin("r1"), plain.begin("r2")
            await plain.state(num_running=1, num_waiting=1)
            await plain.post("/abort_request", {"rid": "r2"})
            answer = await waiting
            assert meta(answer)["finish_reason"]["message"] == "Abort in waiting queue"
            assert "prompt_tokens" not in meta(answer)
            assert "output_token_logprobs" not in meta(answer)
            await asyncio.sleep(0.3)
            await plain.post("/pause_generation", {"mode": "retract"})
            await plain.post("/abort_request", {"rid": "r1"})
            answer = await running
            assert len(answer["output_ids"]) in (50, 100, 150)
            assert len(meta(answer)["output_token_logprobs"]) == len(answer["output_ids"])
            assert meta(answer)["weight_versions"][0]["end"] >= len(answer["output_ids"])

        run_with(engine, work)


def test_what_comes_in_a_pause_waits_at_the_door_where_aborts_are_lost() -> None:
    with start() as engine:

        async def work(plain: Plain) -> None:
            await plain.post("/pause_generation", {})
            call = plain.begin("r1")
            await plain.state(num_at_door=1)
            await plain.post("/abort_request", {"rid": "r1"})
            await plain.post("/continue_generation", {})
            assert meta(await call)["finish_reason"]["type"] == "stop"

        run_with(engine, work)


def test_an_abort_in_an_in_place_pause_takes_effect_when_it_ends() -> None:
    with start() as engine:

        async def work(plain: Plain) -> None:
            call = plain.begin("r1")
            await plain.state(num_running=1)
            await plain.post("/pause_generation", {"mode": "in_place"})
            await plain.post("/abort_request", {"rid": "r1"})
            await asyncio.sleep(0.1)
            assert not call.done()
            await plain.post("/continue_generation", {})
            assert meta(await call)["finish_reason"]["type"] == "abort"

        run_with(engine, work)


@pytest.mark.parametrize(("protocol", "ready"), [("0.5.15", 404), ("0.5.23", 503)])
def test_health_of_a_paused_engine_is_silent_then_503_until_the_next_good_one(
    protocol: Any, ready: int
) -> None:
    with start(protocol=protocol, health_timeout_s=0.3) as engine:

        async def work(plain: Plain) -> None:
            assert (await plain.get("/health"))[0] == 200
            await plain.post("/pause_generation", {"mode": "retract"})
            assert (await plain.get("/ready"))[0] == ready
            assert (await plain.get("/ping"))[0] == 200
            begin = time.monotonic()
            assert (await plain.get("/health"))[0] == 503
            assert time.monotonic() - begin >= 0.3
            await plain.post("/continue_generation", {})
            assert (await plain.get("/ping"))[0] == 503
            assert (await plain.get("/health"))[0] == 200
            assert (await plain.get("/ping"))[0] == 200

        run_with(engine, work)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_tokens_after_an_update_belong_to_the_new_version(mode: str) -> None:
    with start() as engine:

        async def work(plain: Plain) -> None:
            call = plain.begin("r1")
            await plain.state(num_running=1)
            await asyncio.sleep(0.1)
            await plain.post("/pause_generation", {"mode": mode})
            update = {"model_path": "/w", "weight_version": "7", "flush_cache": mode == "retract"}
            status, answer = await plain.post("/update_weights_from_disk", update)
            assert (status, answer["success"]) == (200, True)
            assert (await plain.get("/model_info"))[1]["weight_version"] == "7"
            await plain.post("/continue_generation", {})
            found = meta(await call)
            assert [span["version"] for span in found["weight_versions"]] == ["default", "7"]
            assert found["num_retractions"] == (mode == "retract")
            assert found["weight_version"] == "7"

        run_with(engine, work)


def test_an_update_without_a_pause_waits_for_running_requests_and_holds_new_ones() -> None:
    with start() as engine:

        async def work(plain: Plain) -> None:
            running = plain.begin("r1")
            await plain.state(num_running=1)
            update = {"model_path": "/w", "weight_version": "7"}
            updating = asyncio.create_task(plain.post("/update_weights_from_disk", update))
            await asyncio.sleep(0.1)
            late = plain.begin("r2")
            await plain.state(num_at_door=1)
            assert not updating.done()
            assert meta(await running)["weight_version"] == "default"
            assert (await updating)[0] == 200
            assert meta(await late)["weight_version"] == "7"

        run_with(engine, work)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_cache_can_be_emptied_under_retracted_requests_by_newer_engines_alone(mode: str) -> None:
    async def work(plain: Plain) -> int:
        call = plain.begin("r1")
        await plain.state(num_running=1)
        await plain.post("/pause_generation", {"mode": mode})
        status, _ = await plain.post("/flush_cache", {})
        call.cancel()
        return status

    with start() as engine:
        assert run_with(engine, work) == (200 if mode == "retract" else 400)
    with start(protocol="0.5.15") as engine:
        assert run_with(engine, work) == 400


def test_a_flush_under_requests_held_in_place_is_refused_after_the_update_and_kills_older_engines() -> None:
    update = {"model_path": "/w", "weight_version": "7"}

    async def work(plain: Plain) -> tuple[int, Any]:
        call = plain.begin("r1")
        await plain.state(num_running=1)
        await plain.post("/pause_generation", {"mode": "in_place"})
        try:
            return await plain.post("/update_weights_from_disk", update)
        finally:
            call.cancel()

    with start() as engine:
        status, answer = run_with(engine, work)
        assert (status, answer["success"]) == (400, False)
        assert run_with(engine, lambda plain: plain.get("/model_info"))[1]["weight_version"] == "7"
    with start(protocol="0.5.15") as engine:
        with pytest.raises(aiohttp.ClientError):
            run_with(engine, work)
        assert engine.process.wait(5) == 1


def test_setting_the_version_label_aborts_everything_by_default() -> None:
    with start() as engine:

        async def work(plain: Plain) -> None:
            call = plain.begin("r1")
            await plain.state(num_running=1)
            await plain.post("/update_weight_version", {"new_version": "7"})
            assert meta(await call)["finish_reason"]["type"] == "abort"
            call = plain.begin("r2")
            await plain.state(num_running=1)
            await plain.post("/update_weight_version", {"new_version": "8", "abort_all_requests": False})
            assert meta(await call)["finish_reason"]["type"] == "stop"

        run_with(engine, work)


def test_newer_engines_want_pushed_tensors_announced_and_older_ones_do_not() -> None:
    update = ("/update_weights_from_tensor", {"serialized_named_tensors": [], "weight_version": "7"})

    async def work(plain: Plain) -> list[int]:
        statuses = [(await plain.post(*update))[0]]
        for path, body in (("/begin_weight_update", {}), update, ("/end_weight_update", {}), update):
            statuses.append((await plain.post(path, body))[0])
        assert (await plain.get("/model_info"))[1]["weight_version"] == "7"
        return statuses

    with start() as engine:
        assert run_with(engine, work) == [400, 200, 200, 200, 400]
    with start(protocol="0.5.15") as engine:
        assert run_with(engine, work) == [200, 404, 200, 404, 200]


def test_older_engines_tell_one_version_and_know_no_brackets() -> None:
    with start(protocol="0.5.15", tokens_per_s=0.0) as engine:

        async def work(plain: Plain) -> None:
            assert "weight_versions" not in meta(await plain.generate("r"))
            assert (await plain.post("/begin_weight_update", {}))[0] == 404
            assert (await plain.get("/server_info"))[1]["version"] == "0.5.15"

        run_with(engine, work)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({"temperature": -1}, "temperature must be a non-negative finite number, got -1."),
        ({"seed": 4}, "unknown field `seed`, expected one of"),
        ({"input_ids": [7] * 300}, "(300 tokens) is longer than the model's context length (256 tokens)."),
    ],
)
def test_a_request_that_breaks_a_rule_gets_400_in_the_words_of_sglang(
    change: dict[str, Any], text: str
) -> None:
    with start(context_length=256) as engine:
        status, answer = run_with(engine, lambda plain: plain.post("/generate", request("r", **change)))
        assert status == 400
        assert text in str(answer["error"])


def test_an_id_in_use_is_refused() -> None:
    with start() as engine:

        async def work(plain: Plain) -> None:
            call = plain.begin("dd")
            await plain.state(num_running=1)
            status, answer = await plain.post("/generate", request("dd"))
            assert (status, answer["error"]["message"]) == (400, "Duplicate request ID detected: dd")
            await call

        run_with(engine, work)


def test_a_full_queue_answers_503() -> None:
    with start(max_running=1, max_queued=1) as engine:

        async def work(plain: Plain) -> None:
            calls = [plain.begin("r1"), plain.begin("r2")]
            await plain.state(num_running=1, num_waiting=1)
            status, answer = await plain.post("/generate", request("r3"))
            assert (status, answer["message"]) == (503, "The request queue is full.")
            await asyncio.gather(*calls)

        run_with(engine, work)


def test_ids_outside_of_the_vocabulary_kill_the_engine() -> None:
    with start(vocab_size=100) as engine:
        with pytest.raises(aiohttp.ClientError):
            run_with(engine, lambda plain: plain.generate("r", input_ids=[1, 100]))
        assert engine.process.wait(5) == 1


def test_a_client_that_goes_away_is_noticed() -> None:
    with start(disconnect_abort_s=0.1, lengths=Lengths(tokens=100_000)) as engine:

        async def work(plain: Plain) -> None:
            call = plain.begin("r1")
            await plain.state(num_running=1)
            call.cancel()
            await plain.state(num_running=0)

        run_with(engine, work)


def test_a_streamed_answer_grows_to_the_plain_one() -> None:
    with start(tokens_per_s=2000.0) as engine:

        async def work(plain: Plain) -> None:
            body = request("r", stream_interval=20) | {"stream": True}
            _, text = await plain.post("/generate", body)
            events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
            assert events[-1] == "[DONE]"
            answers = [json.loads(event) for event in events[:-1]]
            counts = [len(a["output_ids"]) for a in answers]
            assert counts == sorted(counts)
            assert len(counts) > 2
            assert [meta(a)["finish_reason"] for a in answers[:-1]] == [None] * (len(answers) - 1)
            assert answers[-1]["output_ids"] == (await plain.generate("s"))["output_ids"]

        run_with(engine, work)


def test_a_request_that_decodes_takes_its_time_and_prefill_comes_first() -> None:
    with start(prefill_s=0.3, tokens_per_s=1000.0) as engine:
        begin = time.monotonic()
        run_with(engine, lambda plain: plain.generate("r"))
        assert time.monotonic() - begin >= 0.5


def test_rules_delay_answer_drop_and_keep_silent() -> None:
    rules = [
        Rule(rid="late", delay_s=0.3),
        Rule(rid="teapot", status=418, body="short and stout"),
        Rule(rid="gone", drop="before"),
        Rule(rid="half", drop="middle"),
        Rule(rid="mute", silent=True),
        Rule(path="/health", exit_code=3),
    ]
    with start(tokens_per_s=0.0, rules=rules) as engine:

        async def work(plain: Plain) -> None:
            begin = time.monotonic()
            await plain.generate("late")
            assert time.monotonic() - begin >= 0.3
            assert (await plain.post("/generate", request("teapot")))[0] == 418
            for rid in ("gone", "half"):
                with pytest.raises(aiohttp.ClientError):
                    await plain.generate(rid)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(plain.generate("mute"), 0.3)
            with pytest.raises(aiohttp.ClientError):
                await plain.get("/health")

        run_with(engine, work)
        assert engine.process.wait(5) == 3


def test_a_script_is_changed_while_requests_run() -> None:
    with start(tokens_per_s=1.0) as engine:

        async def work(plain: Plain) -> None:
            call = plain.begin("r1")
            await plain.state(num_running=1)
            await asyncio.to_thread(engine.configure, tokens_per_s=10_000.0)
            assert len((await call)["output_ids"]) == 200

        run_with(engine, work)


def test_what_came_in_is_recorded() -> None:
    with start(tokens_per_s=0.0) as engine:
        run_with(engine, lambda plain: plain.generate("r", temperature=0.5))
        (recorded,) = engine.requests("/generate")
        assert (recorded.rid, recorded.num_input_ids) == ("r", len(PROMPT))
        assert recorded.input_ids_start == PROMPT[:16]
        assert recorded.body["sampling_params"]["temperature"] == 0.5
        engine.clear()
        assert engine.requests() == []
