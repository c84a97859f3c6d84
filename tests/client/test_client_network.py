"""Proxies, address families, descriptors, concurrency, routers and routing keys."""

import asyncio
import gc
import os
import subprocess
import sys
from typing import Any

import pytest

from fa_rollout.client import Balance, ClientError, Completion, EnginePool, RequestRefused
from tests.client.client_kit import ask, ask_many, assert_true, quick, run_with, sent, until
from tests.kit.scripted import Lengths, Rule, Script, ScriptedEngine

QUICK_ANSWERS = Script(lengths=Lengths(tokens=8))


def test_proxy_variables_do_not_catch_engine_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    with ScriptedEngine.start(QUICK_ANSWERS) as engine:
        assert_true(run_with(engine, ask))


@pytest.mark.parametrize("form", ["::1", "[::1]", "http://[::1]:PORT", "[::1]:PORT", "localhost:PORT"])
def test_an_engine_on_ipv6_is_reached_by_every_form_of_its_address(form: str) -> None:
    with ScriptedEngine.start(QUICK_ANSWERS, host="::1", port=30000 if "PORT" not in form else 0) as engine:
        port = engine.url.rsplit(":", 1)[1]
        assert_true(run_with([form.replace("PORT", port)], ask))


def test_all_that_are_allowed_are_in_flight_at_once() -> None:
    with ScriptedEngine.start(QUICK_ANSWERS, rules=[Rule(rid="-r", delay_s=1.5)]) as engine:

        async def work(pool: EnginePool) -> None:
            calls = asyncio.create_task(ask_many(pool, 600))
            await until(lambda: len(sent(engine)) == 512)
            await asyncio.sleep(0.1)
            assert len(sent(engine)) == 512
            assert pool.statistics().num_waiting == 88
            assert all(isinstance(r, Completion) for r in await calls)

        run_with(engine, work, max_concurrent_samples=512)


_FEW_DESCRIPTORS = """
import asyncio, resource, sys
from fa_rollout.client import EnginePool
from tests.client.client_kit import ask_many
resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[2])))

async def main():
    async with EnginePool([sys.argv[1]], max_concurrent_samples=512) as pool:
        results = await ask_many(pool, 512)
        print(sum(isinstance(r, BaseException) for r in results), pool.statistics().lanes[0].num_allowed)

asyncio.run(main())
"""


@pytest.mark.parametrize(("hard", "allowed"), [(900, 512), (500, 250)])
def test_no_request_fails_for_want_of_descriptors(hard: int, allowed: int) -> None:
    with ScriptedEngine.start(QUICK_ANSWERS, rules=[Rule(rid="-r", delay_s=0.3)]) as engine:
        command = [sys.executable, "-c", _FEW_DESCRIPTORS, engine.url, str(hard)]
        result = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ})
        assert result.stdout.split() == ["0", str(allowed)]
        assert result.stderr.count("concurrency_lowered") == (allowed < 512)


def _router(*workers: ScriptedEngine, **settings: Any) -> ScriptedEngine:
    return ScriptedEngine.start(Script(workers=[w.url for w in workers]), **settings)


def test_behind_a_router_requests_go_through_it_and_control_calls_to_each_worker(tmp_path: Any) -> None:
    with (
        ScriptedEngine.start(QUICK_ANSWERS) as first,
        ScriptedEngine.start(QUICK_ANSWERS) as second,
        _router(first, second) as router,
    ):

        async def work(pool: EnginePool) -> None:
            assert {info.url for info in pool.engines} == {first.url, second.url}
            assert pool.statistics().lanes[0].num_allowed == 2 * 16
            await pool.pause("retract")
            await pool.weights.load(str(tmp_path), "0:1")
            await pool.continue_()
            for result in await ask_many(pool, 10, routing_key="session"):
                assert isinstance(result, Completion)
                assert_true(result)
                assert result.versions == (("0:1", 8),)

        run_with([router.url], work, router=True, max_concurrent_samples=16)
        assert len(sent(router)) == 10
        for worker in (first, second):
            assert len(sent(worker)) == 5
            assert {r.routing_key for r in sent(worker)} == {"session"}
            for path in ("/pause_generation", "/update_weights_from_disk", "/continue_generation"):
                assert len(worker.requests(path)) == 1
        assert {r.path for r in router.requests()} == {"/workers", "/generate"}


def test_a_router_that_takes_paused_workers_out_loses_no_request() -> None:
    with (
        ScriptedEngine.start(QUICK_ANSWERS) as worker,
        _router(worker, router_health_s=0.1) as router,
    ):

        async def work(pool: EnginePool) -> None:
            await pool.pause("retract")
            await until(lambda: not router.state()["healthy"])
            call = asyncio.create_task(ask(pool))
            await pool.continue_()
            assert_true(await call)
            assert pool.statistics().lanes[0].failures == {}

        run_with([router.url], work, router=True)


def test_requests_of_one_key_share_an_engine() -> None:
    with ScriptedEngine.start(QUICK_ANSWERS) as first, ScriptedEngine.start(QUICK_ANSWERS) as second:

        async def work(pool: EnginePool) -> None:
            for key in map(str, range(12)):
                results = await ask_many(pool, 4, routing_key=key)
                assert len({r.engine for r in results if isinstance(r, Completion)}) == 1

        run_with([first.url, second.url], work, balance=Balance.STICKY)
        assert sent(first)
        assert sent(second)


def test_a_large_request_is_sent_whole() -> None:
    with ScriptedEngine.start(QUICK_ANSWERS) as engine:
        prompt = list(range(2, 30002)) * 8  # over a megabyte of JSON
        completion = run_with(engine, lambda pool: ask(pool, input_ids=prompt))
        assert_true(completion, prompt)
        assert sent(engine)[0].num_input_ids == len(prompt)


def test_a_pool_that_is_not_open_says_so() -> None:
    with ScriptedEngine.start(QUICK_ANSWERS) as engine:

        async def main() -> None:
            pool = EnginePool([engine.url], policy=quick())
            with pytest.raises(ClientError, match="must be open"):
                await ask(pool)

        asyncio.run(main())


def test_a_pool_needs_engines() -> None:
    with pytest.raises(ValueError, match="needs one or more engines"):
        EnginePool([])
    with pytest.raises(ValueError, match="exactly one router"):
        EnginePool(["a", "b"], router=True)


def test_a_request_beyond_the_context_is_refused_by_the_engine_once() -> None:
    with ScriptedEngine.start(QUICK_ANSWERS, context_length=16) as engine:

        async def work(pool: EnginePool) -> None:
            with pytest.raises(RequestRefused, match="longer than the model's context length"):
                await ask(pool)

        run_with(engine, work)


def test_answered_requests_leave_no_cycles_to_the_garbage_collector() -> None:
    with ScriptedEngine.start(QUICK_ANSWERS) as engine:

        async def work(pool: EnginePool) -> None:
            for number in range(3):
                await ask(pool, f"r{number}")
            gc.collect()
            gc.disable()
            try:
                gc.set_debug(gc.DEBUG_SAVEALL)
                for number in range(20):
                    await ask(pool, f"r{number}")
                gc.collect()
                assert [kind for kind in map(type, gc.garbage) if "client" in kind.__module__] == []
                assert len(gc.garbage) < 20
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()

        run_with(engine, work)
