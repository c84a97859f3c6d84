"""Pauses: what becomes of requests, of health checks, and of those who wait."""

import asyncio
from typing import Any

import pytest

from fa_rollout.client import Completion, EnginePool
from tests.conformance.conformance_kit import (
    LONG,
    Http,
    Target,
    ask,
    assert_sampled_by,
    quick,
    request,
    under_way,
)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_after_a_pause_answers_go_on_as_if_there_had_been_none(target: Target, model: Any, mode: str) -> None:
    async def work(pool: EnginePool) -> list[Completion]:
        calls = await under_way(pool, 4, max_new_tokens=1500)
        await pool.pause(mode)
        await asyncio.sleep(0.5)
        late = asyncio.create_task(ask(pool, "late", max_new_tokens=10))
        await asyncio.sleep(0.5)
        assert not any(call.done() for call in (*calls, late))
        await pool.continue_()
        await late
        return await asyncio.gather(*calls)

    for completion in target.with_pool(work):
        assert (completion.finish, len(completion.output_ids)) == ("length", 1500)
        assert completion.versions == (("default", 1500),)
        assert_sampled_by(model, completion)


def test_a_pause_by_abort_ends_what_runs_and_holds_what_comes(target: Target, model: Any) -> None:
    async def work(pool: EnginePool) -> list[Completion]:
        calls = await under_way(pool, 4)
        await pool.pause("abort")
        return await asyncio.gather(*calls)

    for completion in target.with_pool(work):
        assert completion.finish == "abort"
        assert len(completion.output_ids) > 0
        assert_sampled_by(model, completion)

    async def hold(http: Http) -> None:
        await http.control("/pause_generation", {})
        call = asyncio.create_task(http.generate(request("late", max_new_tokens=4, ignore_eos=True)))
        await asyncio.sleep(0.7)
        assert not call.done()
        await http.control("/continue_generation", {})
        assert len((await call)[1]["output_ids"]) == 4

    target.with_http(hold)


def test_an_abort_in_an_in_place_pause_takes_effect_at_its_end(target: Target) -> None:
    async def work(http: Http) -> None:
        call = asyncio.create_task(http.generate(request("r", **LONG)))
        await asyncio.sleep(0.7)
        await http.control("/pause_generation", {"mode": "in_place"})
        await http.control("/abort_request", {"rid": "r"})
        await asyncio.sleep(0.7)
        assert call.done() is (target.kind == "embedded")  # which acts at once
        await http.control("/continue_generation", {})
        _, answer = await call
        assert answer["meta_info"]["finish_reason"]["message"] == "Aborted"
        assert answer["meta_info"]["prompt_tokens"]

    target.with_http(work)


def test_to_continue_what_is_not_paused_is_no_error(target: Target) -> None:
    status, answer = target.with_http(lambda http: http.control("/continue_generation", {}))
    assert (status, answer["status"]) == (200, "ok")


def test_an_unknown_mode_is_refused(target: Target) -> None:
    status, answer = target.with_http(lambda http: http.control("/pause_generation", {"mode": "sleep"}))
    assert (status, answer["object"]) == (400, "error")


def test_a_paused_sglang_looks_dead_to_health_checks_until_it_goes_on(target: Target) -> None:
    async def work(http: Http) -> list[int]:
        await http.control("/pause_generation", {"mode": "retract"})
        paused, _ = await http.control("/health")
        await http.control("/continue_generation", {})
        return [paused, (await http.control("/health"))[0]]

    # The embedded engine's check asks whether it lives, and it does.
    assert target.with_http(work) == ([503, 200] if target.kind == "sglang" else [200, 200])


def test_a_pause_by_somebody_else_longer_than_every_deadline_is_no_failure(
    target: Target, model: Any
) -> None:
    async def pause(seconds: float) -> None:
        def during(http: Http) -> Any:
            async def work() -> None:
                await http.control("/pause_generation", {"mode": "retract"})
                await asyncio.sleep(seconds)
                await http.control("/continue_generation", {})

            return work()

        await asyncio.to_thread(target.with_http, during)

    async def work(pool: EnginePool) -> Completion:
        (call,) = await under_way(pool, 1)
        await pause(12.0)
        await asyncio.sleep(0.5)
        assert not call.done() or call.exception() is None
        await pool.abort(["r0"])  # how fast the rest would come is nobody's rule
        return await call

    completion = target.with_pool(work, policy=quick(request_timeout_s=8.0))
    assert completion.finish in ("abort", "length")
    assert len(completion.output_ids) > 0
    assert_sampled_by(model, completion)
