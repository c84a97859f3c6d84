"""SGLang's real router, in front of scripted engines: what it does to requests, retries, pauses."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fa_rollout.client import Completion, EnginePool
from fa_rollout.launcher.engines.program import router_policy
from tests.client.client_kit import ask, ask_many, assert_true, quick, sent
from tests.kit.scripted import Lengths, Rule, Script, ScriptedEngine
from tests.kit.sglang_cpu.launch import SGLangServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

QUICK_ANSWERS = Script(lengths=Lengths(tokens=8))
DROPPED = {
    "session_id": "s",
    "custom_params": {},
    "return_routed_experts": True,
    "cache_salt": "c",
    "nonsense": 1,
}
KEPT = {"extra_key": "k", "return_logprob": True}
BODY = {"rid": "r-1", "input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}}
IMPATIENT = "--health-check-interval-secs 1 --health-check-timeout-secs 1 --health-failure-threshold 1"


Routed = tuple[ScriptedEngine, str]
"""A scripted engine, and the address of a real router in front of it."""


@contextmanager
def start(folder: Path, *options: str) -> Iterator[Routed]:
    with (
        ScriptedEngine.start(QUICK_ANSWERS) as engine,
        SGLangServer.start_router([engine.url], log=folder / "router.log", options=options) as router,
    ):
        yield engine, router.url


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    with start(tmp_path_factory.mktemp("router"), *IMPATIENT.split()) as routed:
        yield routed


@pytest.fixture
def routed(started: Routed) -> Routed:
    started[0].configure(rules=[])
    started[0].clear()
    return started


def post(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[int, Any]:
    async def main() -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession(trust_env=False) as session,
            session.post(url, json=body, headers=headers) as response,
        ):
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text())

    return asyncio.run(main())


def test_it_passes_on_the_keys_that_it_knows_and_drops_the_rest(routed: Routed) -> None:
    engine, url = routed
    headers = {"X-SMG-Routing-Key": "session-1"}
    status, answer = post(f"{url}/generate", BODY | DROPPED | KEPT, headers)
    assert (status, len(answer["output_ids"])) == (200, 4)
    (got,) = sent(engine)
    assert got.rid == "r-1"
    assert {key: got.body[key] for key in KEPT} == KEPT
    assert not set(DROPPED) & set(got.body)


def test_it_has_no_control_endpoints(routed: Routed) -> None:
    engine, url = routed
    for path in ("/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk"):
        assert post(url + path, {})[0] == 404
        assert not engine.requests(path)


def test_it_tries_again_under_the_same_id(routed: Routed) -> None:
    engine, url = routed
    engine.configure(rules=[Rule(rid="r-", status=500, body="no", times=2)])
    assert post(f"{url}/generate", BODY)[0] == 200
    assert [r.rid for r in sent(engine)] == ["r-1"] * 3


def test_it_does_not_try_again_when_told_so(tmp_path: Path) -> None:
    with start(tmp_path, "--disable-retries") as (engine, url):
        engine.configure(rules=[Rule(rid="r-", status=500, body="no", times=2)])
        assert post(f"{url}/generate", BODY)[0] == 500
        assert [r.rid for r in sent(engine)] == ["r-1"]


def test_it_answers_503_for_all_while_its_worker_looks_dead(routed: Routed) -> None:
    engine, url = routed

    def wait_for(status: int) -> None:
        limit = time.monotonic() + 60
        while post(f"{url}/generate", BODY)[0] != status:
            assert time.monotonic() < limit
            time.sleep(0.3)

    wait_for(200)
    engine.configure(rules=[Rule(path="/health", status=503, body="")])
    wait_for(503)
    engine.configure(rules=[])
    wait_for(200)


def test_a_launched_router_loads_workers_evenly_and_keeps_a_group_on_one(tmp_path: Path) -> None:
    num_groups, samples_per_group = 16, 4

    async def work(url: str) -> None:
        async with EnginePool([url], router=True, policy=quick(), max_concurrent_samples=32) as pool:
            calls = [
                ask(pool, f"r-{group:02}-{member}", routing_key=f"group {group}")
                for group in range(num_groups)
                for member in range(samples_per_group)
            ]
            await asyncio.gather(*calls)

    script = Script(lengths=Lengths(kind="uniform", low=10, high=90), tokens_per_s=300.0)
    with ScriptedEngine.start(script) as one, ScriptedEngine.start(script) as other:
        options = ["--disable-retries", *router_policy("group")]
        with SGLangServer.start_router(
            [one.url, other.url], log=tmp_path / "router.log", options=options
        ) as router:
            asyncio.run(work(router.url))
        keys = [{request.routing_key for request in sent(engine)} for engine in (one, other)]
        assert not keys[0] & keys[1], "requests of one group share a worker"
        assert min(len(of_one) for of_one in keys) >= num_groups * 3 / 8


def test_the_client_loses_no_request_to_a_router_that_takes_paused_workers_out(routed: Routed) -> None:
    engine, url = routed

    async def work() -> list[Completion | BaseException]:
        async with EnginePool([url], router=True, policy=quick(control_timeout_s=30.0)) as pool:
            assert pool.engines[0].url == engine.url
            await pool.pause("retract")
            await asyncio.sleep(3.0)  # health checks find the worker silent meanwhile
            calls = asyncio.create_task(ask_many(pool, 8))
            await pool.continue_()
            results = await calls
            assert pool.statistics().lanes[0].failures == {}
            return results

    for result in asyncio.run(work()):
        assert isinstance(result, Completion), result
        assert_true(result)
