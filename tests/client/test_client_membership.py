"""Engines that join and leave a pool at work: weights first, nothing lost, behind a router or not."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from fa_rollout.client import Completion, ControlFailed, EnginePool
from fa_rollout.client.base.errors import EngineUnavailable
from tests.client.client_kit import ask, ask_many, assert_true, quick, run_with, sent, until
from tests.kit.scripted import Lengths, Rule, Script, ScriptedEngine

SLOW = Script(tokens_per_s=200.0, lengths=Lengths(tokens=100))
LOADS = "/update_weights_from_disk"


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    started = [ScriptedEngine.start(SLOW) for _ in range(2)]
    yield started
    for engine in started:
        engine.stop()


def paths(engine: ScriptedEngine) -> list[str]:
    """What was asked for, probes included, in order."""
    return [request.path for request in engine.requests()]


def test_an_engine_that_joins_holds_the_current_weights_before_its_first_request(
    engines: list[ScriptedEngine], tmp_path: Path
) -> None:
    first, second = engines

    async def work(pool: EnginePool) -> list[Completion | BaseException]:
        await pool.weights.load(str(tmp_path), "run:7")
        asking = asyncio.create_task(ask_many(pool, 12))
        await pool.members.join(second.url, "run:7")
        await until(lambda: bool(sent(second)))
        assert pool.capacity == 8
        return await asking

    results = run_with([first.url], work, max_concurrent_samples=4)
    for result in results:
        assert isinstance(result, Completion)
        assert_true(result)
        assert result.versions[-1][0] == "run:7"
    asked = paths(second)
    probe = asked.index("/generate")
    assert asked.index(LOADS) < asked.index("/generate", probe + 1)


def test_an_engine_that_already_holds_them_is_asked_to_load_nothing(engines: list[ScriptedEngine]) -> None:
    first, second = engines
    second.configure(weight_version="default")

    async def work(pool: EnginePool) -> None:
        pool.weights.assume(None, "default")
        await pool.members.join(second.url, "default")

    run_with([first.url], work)
    assert LOADS not in paths(second)


def test_an_update_in_the_middle_of_a_join_does_not_miss_the_newcomer(
    engines: list[ScriptedEngine], tmp_path: Path
) -> None:
    first, second = engines
    second.configure(update_s=0.5)

    async def work(pool: EnginePool) -> dict[str, str | None]:
        await pool.weights.load(str(tmp_path), "run:1")
        joining = asyncio.create_task(pool.members.join(second.url, "run:1"))
        await until(lambda: LOADS in paths(second))
        await pool.pause("retract")
        await pool.weights.load(str(tmp_path), "run:2")
        await pool.continue_()
        await joining
        return await pool.weights.versions()

    assert run_with([first.url], work) == {first.url: "run:2", second.url: "run:2"}


def test_weights_that_nobody_here_can_give_keep_an_engine_out(engines: list[ScriptedEngine]) -> None:
    first, second = engines

    async def work(pool: EnginePool) -> None:
        await pool.weights.set_label("run:3")  # pushed by hand
        with pytest.raises(ControlFailed, match="must have version 'run:3' to join"):
            await pool.members.join(second.url, "run:3")
        assert pool.urls == [first.url]

    run_with([first.url], work)


def test_an_engine_that_never_comes_up_is_told_and_the_others_go_on(engines: list[ScriptedEngine]) -> None:
    async def work(pool: EnginePool) -> Completion:
        with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:9"):
            await pool.members.join("127.0.0.1:9", "default")
        return await ask(pool)

    assert_true(run_with(engines[0], work, policy=quick(start_timeout_s=0.5)))


def test_an_engine_that_leaves_ends_what_it_has_and_gets_no_more(engines: list[ScriptedEngine]) -> None:
    first, second = engines

    async def work(pool: EnginePool) -> list[Completion | BaseException]:
        asking = asyncio.create_task(ask_many(pool, 16))
        await until(lambda: len(sent(second)) == 4)
        await pool.members.leave(second.url, drain_s=30.0)
        assert second.state()["num_running"] == 0
        before = len(sent(second))
        results = await asking
        assert len(sent(second)) == before
        assert pool.urls == [first.url]
        assert [info.url for info in pool.engines] == [first.url]
        return results

    for result in run_with([e.url for e in engines], work, max_concurrent_samples=4):
        assert isinstance(result, Completion)
        assert result.finish == "stop"
        assert_true(result)


def test_what_an_engine_cannot_end_in_time_comes_back_with_its_tokens(engines: list[ScriptedEngine]) -> None:
    second = engines[1]
    second.configure(tokens_per_s=20.0)

    async def work(pool: EnginePool) -> list[Completion | BaseException]:
        asking = asyncio.create_task(ask_many(pool, 8))
        await until(lambda: second.state()["num_running"] == 4)
        await asyncio.sleep(0.3)
        await pool.members.leave(second.url, drain_s=0.0)
        return await asking

    results = run_with([e.url for e in engines], work, max_concurrent_samples=4)
    finishes = [result.finish for result in results if isinstance(result, Completion)]
    assert sorted(finishes) == ["abort"] * 4 + ["stop"] * 4
    for result in results:
        assert isinstance(result, Completion)
        assert len(result.output_ids)
        assert_true(result)


def test_the_last_engine_stays(engines: list[ScriptedEngine]) -> None:
    async def work(pool: EnginePool) -> Completion:
        with pytest.raises(ControlFailed, match="is the last engine of the run"):
            await pool.members.leave(engines[0].url, drain_s=0.0)
        return await ask(pool)

    assert_true(run_with(engines[0], work))


def test_a_dead_engine_leaves_at_once_and_is_probed_no_more(engines: list[ScriptedEngine]) -> None:
    second = engines[1]

    async def work(pool: EnginePool) -> list[Completion | BaseException]:
        asking = asyncio.create_task(ask_many(pool, 16))
        await until(lambda: len(sent(second)) == 4)
        second.stop()
        await pool.members.leave(second.url, drain_s=30.0)
        return await asking

    for result in run_with([e.url for e in engines], work, max_concurrent_samples=4):
        assert isinstance(result, Completion)
        assert_true(result)


def test_an_engine_may_come_and_go_and_come_again(engines: list[ScriptedEngine], tmp_path: Path) -> None:
    first, second = engines

    async def work(pool: EnginePool) -> None:
        await pool.weights.load(str(tmp_path), "run:1")
        for _ in range(3):
            await pool.members.join(second.url, "run:1")
            assert pool.urls == [first.url, second.url]
            await pool.members.leave(second.url, drain_s=5.0)
        assert pool.capacity == 4

    run_with([first.url], work, max_concurrent_samples=4)


def test_a_joining_engine_without_version_spans_is_refused_where_the_others_have_them(
    engines: list[ScriptedEngine],
) -> None:
    async def work(pool: EnginePool) -> None:
        with (
            ScriptedEngine.start(SLOW, protocol="0.5.15") as old,
            pytest.raises(ControlFailed, match="version spans"),
        ):
            await pool.members.join(old.url, "default")

    run_with(engines[0], work)


def test_behind_a_router_a_worker_joins_with_the_current_weights(
    engines: list[ScriptedEngine], tmp_path: Path
) -> None:
    first, second = engines

    async def work(pool: EnginePool) -> dict[str, str | None]:
        await pool.weights.load(str(tmp_path), "run:5")
        await pool.members.join(second.url, "run:5")
        results = await ask_many(pool, 8)
        for result in results:
            assert isinstance(result, Completion)
            assert result.versions[-1][0] == "run:5"
        assert pool.capacity == 8
        return await pool.weights.versions()

    with ScriptedEngine.start(Script(workers=[first.url])) as router:
        versions = run_with([router.url], work, router=True, max_concurrent_samples=4)
    assert versions == {first.url: "run:5", second.url: "run:5"}
    assert sent(second), "the router knows it"
    assert paths(second).index(LOADS) < len(paths(second)) - len(sent(second))


def test_behind_a_router_a_worker_that_left_gets_no_more_requests(engines: list[ScriptedEngine]) -> None:
    first, second = engines

    async def work(pool: EnginePool) -> None:
        await pool.members.leave(second.url, drain_s=0.0)
        await ask_many(pool, 8)
        assert not sent(second)
        assert len(sent(first)) == 8

    with ScriptedEngine.start(Script(workers=[e.url for e in engines])) as router:
        run_with([router.url], work, router=True)


def test_a_join_waits_for_an_engine_that_still_starts(engines: list[ScriptedEngine]) -> None:
    first, second = engines
    second.configure(rules=[Rule(path="/model_info", status=503, times=3)])

    async def work(pool: EnginePool) -> Completion:
        await pool.members.join(second.url, "default")
        return await ask(pool)

    assert_true(run_with([first.url], work))


def test_who_takes_over_does_not_wait_for_an_engine_that_is_away(engines: list[ScriptedEngine]) -> None:
    second = engines[1]
    port = int(second.url.rsplit(":", 1)[1])
    second.stop()

    async def work(pool: EnginePool) -> None:
        pool.weights.assume(None, "run:4")
        assert_true(await ask(pool))
        with ScriptedEngine.start(SLOW, port=port) as back:
            await until(lambda: pool.statistics().lanes[1].circuit == "closed")
            assert back.state()["weight_version"] == "run:4"
            await ask_many(pool, 4)
            assert sent(back)

    run_with([e.url for e in engines], work, takes_over=True)


def test_a_worker_that_was_set_aside_is_on_the_routers_list_again_when_the_pool_is_closed(
    engines: list[ScriptedEngine],
) -> None:
    urls = {engine.url for engine in engines}

    async def work(pool: EnginePool) -> None:
        pool.weights.expect_streamed("run:1")  # which none of them tells
        await until(lambda: not listed(router))

    with ScriptedEngine.start(Script(workers=list(urls))) as router:
        run_with([router.url], work, router=True)
        asyncio.run(until(lambda: listed(router) == urls))


def listed(router: ScriptedEngine) -> set[str]:
    with urllib.request.urlopen(f"{router.url}/workers", timeout=10) as answer:
        return {worker["url"] for worker in json.load(answer)["workers"]}


def test_requests_wait_while_a_router_has_no_worker(engines: list[ScriptedEngine]) -> None:
    first = engines[0]
    port = int(first.url.rsplit(":", 1)[1])

    async def work(pool: EnginePool) -> list[Completion | BaseException]:
        first.stop()
        while await pool._fleet.has_healthy_workers():  # noqa: ASYNC110 - the router finds out by itself
            await asyncio.sleep(0.02)
        asking = asyncio.create_task(ask_many(pool, 4))
        await until(lambda: pool.statistics().lanes[0].circuit == "open")
        await asyncio.sleep(1.0)  # longer than both attempts of a request and what is between them
        with ScriptedEngine.start(SLOW, port=port):
            return await asking

    policy = quick(max_attempts=2, unavailable_timeout_s=30.0)
    with ScriptedEngine.start(Script(workers=[first.url], router_health_s=0.05)) as router:
        results = run_with([router.url], work, router=True, policy=policy)
    for result in results:
        assert isinstance(result, Completion)
        assert_true(result)


def test_two_wishes_for_one_engine_make_one_engine(engines: list[ScriptedEngine]) -> None:
    first, second = engines

    async def work(pool: EnginePool) -> None:
        await asyncio.gather(*(pool.members.join(second.url, "default") for _ in range(3)))
        assert pool.urls == [first.url, second.url]
        assert len(pool.engines) == 2

    run_with([first.url], work)


@pytest.mark.parametrize("said", ['{"workers":null}', '{"workers":[3]}', '{"workers":[{"url":"a:b:c:d"}]}'])
def test_a_list_of_workers_that_cannot_be_read_is_a_router_that_does_not_answer(said: str) -> None:
    unreadable = Rule(path="/workers", status=200, body=said)

    async def work(pool: EnginePool) -> None:
        router.configure(rules=[replace(unreadable, times=3), Rule(rid="-r", status=503, times=2)])
        assert_true(await ask(pool))
        assert len([r for r in router.requests() if r.path == "/workers"]) > 3
        router.configure(rules=[unreadable])
        with pytest.raises(ControlFailed, match="must list urls"):
            await pool._fleet.strike_off(engine.url)

    with (
        ScriptedEngine.start(Script(lengths=Lengths(tokens=8))) as engine,
        ScriptedEngine.start(Script(workers=[engine.url])) as router,
    ):
        run_with([router.url], work, router=True)


def test_an_engine_that_starts_again_with_an_old_label_is_no_other_run_that_pushes(
    engines: list[ScriptedEngine], tmp_path: Path
) -> None:
    second = engines[1]
    port = int(second.url.rsplit(":", 1)[1])

    async def work(pool: EnginePool) -> None:
        pool.weights.claim({"run"})
        await pool.weights.load(str(tmp_path), "run:4")
        second.stop()
        for completion in await ask_many(pool, 4):
            assert_true(completion)  # type: ignore[arg-type]
        revived = replace(SLOW, weight_version="old:3")
        with ScriptedEngine.start(revived, port=port) as back:
            await ask_many(pool, 4)
            pool.weights.recheck()
            await until(lambda: LOADS in paths(back))
        assert not pool._recovery.weights.taken.done()

    run_with([engine.url for engine in engines], work)
