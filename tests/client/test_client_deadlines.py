"""No wait is without a deadline: silent requests, silent control calls, workers behind a router."""

import asyncio
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fa_rollout.client import Completion, ControlFailed, EnginePool, RequestTimedOut
from tests.client.client_kit import ask, ask_many, assert_true, quick, run_with, sent, until
from tests.kit.scripted import Lengths, Rule, Script, ScriptedEngine

QUICK_ANSWERS = Script(lengths=Lengths(tokens=8))


def test_two_silent_requests_of_many_are_aborted_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    rule = Rule(rid="-r", silent=True, skip=20, every=30, times=2)
    with ScriptedEngine.start(QUICK_ANSWERS, rules=[rule]) as engine:
        policy = quick(request_timeout_s=0.5, abort_grace_s=0.1)
        with caplog.at_level(logging.WARNING):
            results = run_with(engine, lambda pool: ask_many(pool, 128), policy=policy)
        for result in results:
            assert isinstance(result, Completion)
            assert_true(result)
        requests = sent(engine)
        assert len(requests) == 130
        aborted = {r.rid for r in sent(engine, "/abort_request")}
        assert len(aborted) == 2
        for rid in aborted:
            assert str(rid) in caplog.text
        assert f"endpoint={engine.url}" in caplog.text
        assert "age_s=" in caplog.text


def test_a_request_that_is_always_silent_is_aborted_before_each_retry_and_given_up_at_the_cap() -> None:
    with ScriptedEngine.start(QUICK_ANSWERS, rules=[Rule(rid="-r", silent=True)]) as engine:

        async def work(pool: EnginePool) -> None:
            with pytest.raises(RequestTimedOut, match="attempt 3"):
                await ask(pool)

        run_with(engine, work, policy=quick(request_timeout_s=0.2, abort_grace_s=0.1, max_attempts=3))
        order = [(r.path, r.rid) for r in engine.requests() if "-r" in (r.rid or "")]
        attempts = list(dict.fromkeys(rid for _, rid in order))
        assert len(attempts) == 3
        first_abort = {rid: order.index(("/abort_request", rid)) for rid in attempts}
        for rid, next_rid in pairwise(attempts):
            assert first_abort[rid] < order.index(("/generate", next_rid))


def test_a_long_answer_that_meets_its_deadline_comes_back_with_the_tokens_it_has() -> None:
    with ScriptedEngine.start(QUICK_ANSWERS, tokens_per_s=100.0, lengths=Lengths(tokens=1000)) as engine:

        async def work(pool: EnginePool) -> None:
            completion = await ask(pool)
            assert completion.finish == "abort"
            assert 20 < len(completion.output_ids) < 200
            assert_true(completion)
            assert pool.statistics().num_in_flight == 0

        run_with(engine, work, policy=quick(request_timeout_s=0.5))
        assert len(sent(engine)) == 1


async def pause_and_continue(pool: EnginePool) -> None:
    await pool.pause("retract")
    await pool.continue_()


CONTROL_CALLS = {
    "/pause_generation": lambda pool, path: pool.pause("retract"),
    "/continue_generation": lambda pool, path: pause_and_continue(pool),
    "/update_weights_from_disk": lambda pool, path: pool.weights.load(path, "0:1"),
    "/update_weight_version": lambda pool, path: pool.weights.set_label("0:1"),
    "/model_info": lambda pool, path: pool.weights.versions(),
}


@pytest.mark.parametrize("path", CONTROL_CALLS)
def test_a_silent_control_endpoint_is_an_error_at_its_deadline(path: str, tmp_path: Path) -> None:
    with ScriptedEngine.start(QUICK_ANSWERS) as engine:

        async def work(pool: EnginePool) -> None:
            engine.configure(rules=[{"path": path, "silent": True}])
            with pytest.raises(ControlFailed, match=f"{path} must be answered: no answer within 0"):
                await CONTROL_CALLS[path](pool, str(tmp_path))
            engine.configure(rules=[])
            assert_true(await ask(pool))

        limits: dict[str, Any] = dict.fromkeys(
            ("control_timeout_s", "pause_timeout_s", "update_timeout_s"), 0.3
        )
        run_with(engine, work, policy=quick(**limits))


def test_a_silent_abort_endpoint_holds_up_nobody() -> None:
    rules = [Rule(rid="-r", silent=True), Rule(path="/abort_request", silent=True)]
    with ScriptedEngine.start(QUICK_ANSWERS, rules=rules) as engine:

        async def work(pool: EnginePool) -> None:
            with pytest.raises(RequestTimedOut):
                await ask(pool)
            assert pool.statistics().num_aborts_undelivered == 2

        policy = quick(request_timeout_s=0.2, control_timeout_s=0.2, abort_grace_s=0.1, max_attempts=2)
        run_with(engine, work, policy=policy)


def _behind_router(*workers: ScriptedEngine, **settings: Any) -> ScriptedEngine:
    return ScriptedEngine.start(Script(workers=[w.url for w in workers], **settings))


def test_behind_a_router_each_worker_is_told_to_abort_exactly_our_id_before_the_retry() -> None:
    silent = Rule(rid="-r", silent=True, times=1)
    with (
        ScriptedEngine.start(QUICK_ANSWERS, rules=[silent]) as first,
        ScriptedEngine.start(QUICK_ANSWERS, rules=[silent]) as second,
        _behind_router(first, second) as router,
    ):
        policy = quick(request_timeout_s=0.4, abort_grace_s=0.1)
        results = run_with([router.url], lambda pool: ask_many(pool, 8), router=True, policy=policy)
        for result in results:
            assert isinstance(result, Completion)
            assert_true(result)
        requests = sent(router)
        assert len(requests) == 10
        retries = {r.rid: r.time_s for r in requests[8:]}
        aborts = {worker.url: sent(worker, "/abort_request") for worker in (first, second)}
        ids = [{r.rid for r in calls} for calls in aborts.values()]
        assert ids[0] == ids[1]
        assert len(ids[0]) == 2
        assert not any(r.body.get("abort_all") for calls in aborts.values() for r in calls)
        for calls in aborts.values():
            assert min(r.time_s for r in calls) < min(retries.values())
        assert not sent(router, "/abort_request")


def test_workers_that_cannot_be_reached_are_counted_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rules = [Rule(rid="-r", silent=True, times=1), Rule(path="/abort_request", drop="before")]
    with ScriptedEngine.start(QUICK_ANSWERS, rules=rules) as worker, _behind_router(worker) as router:

        async def work(pool: EnginePool) -> None:
            assert_true(await ask(pool))
            assert pool.statistics().num_aborts_undelivered >= 1

        policy = quick(request_timeout_s=0.3, abort_grace_s=0.05)
        with caplog.at_level(logging.WARNING):
            run_with([router.url], work, router=True, policy=policy)
        assert "event=abort_not_delivered" in caplog.text


def test_a_cancelled_call_is_ended_at_its_engine() -> None:
    with ScriptedEngine.start(QUICK_ANSWERS, rules=[Rule(rid="-r", silent=True)]) as engine:

        async def work(pool: EnginePool) -> None:
            call = asyncio.create_task(ask(pool))
            await until(lambda: len(sent(engine)) == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert pool.statistics().num_in_flight == 0
            await until(lambda: len(sent(engine, "/abort_request")) == 1)

        run_with(engine, work)
        assert sent(engine)[0].rid == sent(engine, "/abort_request")[0].rid


def test_closing_ends_open_calls_as_aborts() -> None:
    with ScriptedEngine.start(QUICK_ANSWERS, tokens_per_s=50.0, lengths=Lengths(tokens=9999)) as engine:

        async def main() -> None:
            pool = EnginePool([engine.url], policy=quick(), max_concurrent_samples=2)
            await pool.start()
            calls = [asyncio.create_task(ask(pool, f"r{i}")) for i in range(4)]
            await until(lambda: engine.state()["num_running"] == 2)
            await pool.aclose()
            for call in calls:
                completion = await asyncio.wait_for(call, 1)
                assert completion.finish == "abort"
            await pool.aclose()

        asyncio.run(main())
        assert engine.state()["num_running"] == 0
