"""Aborts: of what runs, of what waits, of what is not known, and in pauses."""

import asyncio
import time
from typing import Any

from fa_rollout.client import Completion, EnginePool
from tests.conformance.conformance_kit import (
    LONG,
    MAX_RUNNING,
    Http,
    Target,
    ask,
    assert_sampled_by,
    quick,
    request,
    under_way,
)

QUEUE_KEYS = {"id", "finish_reason", "weight_version", "e2e_latency", "completion_tokens"}


def test_an_aborted_answer_comes_back_with_its_tokens_and_the_others_go_on(
    target: Target, model: Any
) -> None:
    async def work(pool: EnginePool) -> tuple[Completion, list[Completion]]:
        calls = await under_way(pool, 3, max_new_tokens=1500)
        await pool.abort(["r1", "nobody"])
        return await calls[1], [await calls[0], await calls[2]]

    aborted, others = target.with_pool(work)
    assert aborted.finish == "abort"
    assert 0 < len(aborted.output_ids) < 1500
    assert_sampled_by(model, aborted)
    for completion in others:
        assert (completion.finish, len(completion.output_ids)) == ("length", 1500)
        assert_sampled_by(model, completion)


def test_an_abort_ends_every_id_that_begins_with_it_but_only_if_it_is_known(target: Target) -> None:
    async def work(http: Http) -> None:
        calls = {rid: asyncio.create_task(http.generate(request(rid, **LONG))) for rid in ("r1", "r10", "q")}
        await asyncio.sleep(0.7)
        for unknown in ("r", "r2", ""):
            assert (await http.control("/abort_request", {"rid": unknown}))[0] == 200
        await asyncio.sleep(0.3)
        assert not any(call.done() for call in calls.values())
        await http.control("/abort_request", {"rid": "r1"})
        for rid in ("r1", "r10"):
            _, answer = await calls[rid]
            assert answer["meta_info"]["finish_reason"] == {
                "type": "abort",
                "message": "Aborted",
                "status_code": None,
                "err_type": None,
            }
        assert not calls["q"].done()
        await http.control("/abort_request", {"rid": "", "abort_all": True})
        assert (await calls["q"])[1]["meta_info"]["finish_reason"]["type"] == "abort"

    target.with_http(work)


def test_the_clients_ids_are_never_prefixes_of_each_other(target: Target) -> None:
    async def work(pool: EnginePool) -> None:
        calls = [asyncio.create_task(ask(pool, rid, **LONG)) for rid in ("r1", "r10", "r1-m1")]
        await asyncio.sleep(0.7)
        await pool.abort(["r1"])
        assert (await calls[0]).finish == "abort"
        await asyncio.sleep(0.3)
        assert not any(call.done() for call in calls[1:])
        await pool.abort(["r10", "r1-m1"])
        await asyncio.gather(*calls)

    target.with_pool(work)


def test_with_several_samples_an_abort_by_the_original_id_does_nothing(target: Target) -> None:
    async def work(http: Http) -> None:
        rid = f"nn{time.monotonic_ns()}"  # SGLang never forgets the original id, and refuses it a second time
        call = asyncio.create_task(http.generate(request(rid, max_new_tokens=300, n=2, ignore_eos=True)))
        await asyncio.sleep(0.3)
        await http.control("/abort_request", {"rid": rid})
        _, answers = await call
        assert [len(answer["output_ids"]) for answer in answers] == [300, 300]

    target.with_http(work)


def test_an_abort_in_the_queue_comes_back_without_tokens_and_counts(target: Target) -> None:
    async def work(http: Http) -> None:
        held = [asyncio.create_task(http.generate(request(f"h{i}", **LONG))) for i in range(MAX_RUNNING)]
        await asyncio.sleep(0.7)
        waiting = asyncio.create_task(http.generate(request("w", **LONG)))
        await asyncio.sleep(0.3)
        await http.control("/abort_request", {"rid": "w"})
        _, answer = await waiting
        meta = answer["meta_info"]
        assert answer["output_ids"] == meta["output_token_logprobs"] == []
        assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
        assert set(meta) > QUEUE_KEYS
        assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & set(meta)
        await http.control("/abort_request", {"rid": "", "abort_all": True})
        await asyncio.gather(*held)

    target.with_http(work)


def test_the_client_takes_an_abort_in_the_queue_for_a_normal_answer(target: Target) -> None:
    async def work(pool: EnginePool) -> None:
        calls = await under_way(pool, MAX_RUNNING)
        waiting = asyncio.create_task(ask(pool, "waits", **LONG))
        await asyncio.sleep(0.3)
        await pool.abort(["waits"])
        completion = await waiting
        assert (completion.finish, len(completion.output_ids), completion.prompt_tokens) == ("abort", 0, None)
        assert completion.versions == ()
        await pool.abort([f"r{i}" for i in range(MAX_RUNNING)])
        await asyncio.gather(*calls)

    target.with_pool(work)


def test_a_retracted_request_that_is_aborted_keeps_tokens(target: Target, model: Any) -> None:
    async def aborted_after(pool: EnginePool, seconds: float) -> Completion:
        (call,) = await under_way(pool, 1, seconds)
        await pool.pause("retract")
        await pool.abort(["r0"])
        completion = await call
        await pool.continue_()
        return completion

    async def work(pool: EnginePool) -> Completion:
        # SGLang reports every 50 tokens, and forgets what it has not reported: a slow one reports nothing yet
        for seconds in (0.35, 1.5, 6.0):
            completion = await aborted_after(pool, seconds)
            if len(completion.output_ids) > 0:
                break
        return completion

    completion = target.with_pool(work)
    assert completion.finish == "abort"
    assert len(completion.output_ids) > 0
    if target.kind == "sglang":  # it has reported that far, and the rest is lost
        assert len(completion.output_ids) % 50 == 0
    assert_sampled_by(model, completion)


def test_the_abort_of_a_request_that_came_in_a_pause_is_lost_and_the_client_ends_its_call_all_the_same(
    target: Target,
) -> None:
    async def work(http: Http) -> tuple[str, int]:
        await http.control("/pause_generation", {"mode": "retract"})
        call = asyncio.create_task(http.generate(request("door", max_new_tokens=20, ignore_eos=True)))
        await asyncio.sleep(0.3)
        await http.control("/abort_request", {"rid": "door"})
        await asyncio.sleep(0.5)
        await http.control("/continue_generation", {})
        _, answer = await call
        return answer["meta_info"]["finish_reason"]["type"], len(answer["output_ids"])

    # The embedded engine forgets no abort.
    assert target.with_http(work) == (("length", 20) if target.kind == "sglang" else ("abort", 0))

    async def call_in_a_pause_of_somebody_else(pool: EnginePool) -> Completion:
        await asyncio.to_thread(
            target.with_http, lambda h: h.control("/pause_generation", {"mode": "retract"})
        )
        call = asyncio.create_task(ask(pool, **LONG))
        await asyncio.sleep(0.3)
        await pool.abort(["r"])
        completion = await call
        await asyncio.to_thread(target.with_http, lambda h: h.control("/continue_generation", {}))
        return completion

    completion = target.with_pool(call_in_a_pause_of_somebody_else, policy=quick(abort_grace_s=2.0))
    assert (completion.finish, len(completion.output_ids)) == ("abort", 0)
