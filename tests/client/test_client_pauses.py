"""Aborts, pauses and weight versions: exact, and of our own requests alone."""

import asyncio
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from fa_rollout.client import Completion, ControlFailed, EnginePool
from tests.client.client_kit import ask, ask_many, assert_true, post, quick, run_with, sent, until
from tests.kit.scripted import Lengths, Rule, Script, ScriptedEngine

SLOW = Script(tokens_per_s=200.0, lengths=Lengths(tokens=100))


def ask_and_hang_up(engine: ScriptedEngine) -> None:
    with pytest.raises(TimeoutError):
        urllib.request.urlopen(f"{engine.url}/generate", b'{"rid": "orphan", "input_ids": [7]}', 0.2)


async def start_many(pool: EnginePool, count: int) -> list[asyncio.Task[Completion]]:
    """Calls that are in the air when this returns."""
    calls = [asyncio.create_task(ask(pool, f"r{i}")) for i in range(count)]
    await until(lambda: pool.statistics().num_in_flight == min(count, pool.statistics().lanes[0].num_allowed))
    await asyncio.sleep(0.1)
    return calls


def test_an_engine_that_a_dead_run_left_paused_goes_on_at_the_start() -> None:
    with ScriptedEngine.start(SLOW) as engine:
        post(engine, "/pause_generation", {"mode": "retract"})
        completion = run_with(engine, ask, policy=quick(control_timeout_s=0.5, start_timeout_s=20.0))
        assert completion.finish == "stop"


def test_an_engine_that_somebody_else_has_paused_is_left_to_him_and_waited_for() -> None:
    with ScriptedEngine.start(SLOW) as engine:
        post(engine, "/pause_generation", {"mode": "abort"})

        async def main() -> None:
            policy = quick(control_timeout_s=0.2, start_timeout_s=0.1)
            pool = EnginePool([engine.url], policy=policy, ends_pauses=False)
            opening = asyncio.create_task(pool.start())
            await until(lambda: len(engine.requests("/generate")) > 2)
            assert not opening.done(), "longer than any deadline of a start, and no failure"
            assert not engine.requests("/continue_generation")
            post(engine, "/continue_generation", {})
            await opening
            assert (await ask(pool)).finish == "stop"
            await pool.aclose()

        asyncio.run(main())


@pytest.mark.parametrize("num_tokens", [0, 7])
def test_an_abort_nobody_asked_for_is_a_normal_answer(num_tokens: int) -> None:
    with ScriptedEngine.start(SLOW, rules=[Rule(rid="-r", abort_after=num_tokens)]) as engine:

        async def work(pool: EnginePool) -> None:
            completion = await ask(pool)
            assert completion.finish == "abort"
            assert len(completion.output_ids) == num_tokens
            assert_true(completion)
            lane = pool.statistics().lanes[0]
            assert (lane.num_done, lane.num_aborted, lane.failures) == (1, 1, {})

        run_with(engine, work)
        assert len(sent(engine)) == 1


def test_all_in_flight_aborted_by_somebody_else_again_and_again_loses_none() -> None:
    with ScriptedEngine.start(SLOW) as engine:

        async def work(pool: EnginePool) -> None:
            for _ in range(5):
                calls = await start_many(pool, 64)
                post(engine, "/update_weight_version", {"new_version": "x"})  # aborts all by default
                for call in calls:
                    completion = await call
                    assert completion.finish == "abort"
                    assert_true(completion)
            assert pool.statistics().lanes[0].failures == {}
            assert pool.statistics().num_in_flight == 0

        run_with(engine, work)


def test_our_aborts_end_our_requests_and_no_other_with_a_name_alike() -> None:
    with ScriptedEngine.start(SLOW) as engine:

        async def work(pool: EnginePool) -> None:
            calls = await start_many(pool, 12)  # r1, r10 and r11 begin alike
            await pool.abort(["r1", "unknown"])
            results = [await call for call in calls]
            assert [i for i, r in enumerate(results) if r.finish == "abort"] == [1]
            assert 0 < len(results[1].output_ids) < 100
            for result in results:
                assert_true(result)

        run_with(engine, work)
        assert len({r.rid for r in sent(engine, "/abort_request")}) == 1


def test_a_call_aborted_while_it_waits_for_a_slot_is_never_sent() -> None:
    with ScriptedEngine.start(SLOW) as engine:

        async def work(pool: EnginePool) -> None:
            calls = await start_many(pool, 6)
            await pool.abort(["r4", "r5"])
            for call in calls[4:]:
                completion = await asyncio.wait_for(call, 0.2)
                assert completion.finish == "abort"
                assert len(completion.output_ids) == 0
            assert [(await call).finish for call in calls[:4]] == ["stop"] * 4

        run_with(engine, work, max_concurrent_samples=2)
        assert len(sent(engine)) == 4


def test_calls_aborted_in_the_middle_of_a_burst_end_without_being_sent() -> None:
    with ScriptedEngine.start(SLOW) as engine:

        async def work(pool: EnginePool) -> None:
            calls = [asyncio.create_task(ask(pool, f"r{i}")) for i in range(200)]
            await asyncio.sleep(0)  # each has a slot, and few have been sent
            await pool.abort([f"r{i}" for i in range(200)])
            async with asyncio.timeout(30):
                assert {completion.finish for completion in await asyncio.gather(*calls)} == {"abort"}
            assert len(sent(engine)) < 200
            assert pool.statistics().num_in_flight == 0

        run_with(engine, work)


def test_a_call_aborted_between_two_attempts_is_not_sent_again() -> None:
    with ScriptedEngine.start(SLOW, rules=[Rule(rid="-r", status=500)]) as engine:

        async def work(pool: EnginePool) -> None:
            call = asyncio.create_task(ask(pool))
            await until(lambda: len(sent(engine)) == 1)
            await pool.abort(["r"])
            assert (await call).finish == "abort"

        run_with(engine, work, policy=quick(backoff_base_s=100.0, backoff_cap_s=100.0))
        assert len(sent(engine)) == 1


def test_an_abort_in_the_queue_of_the_engine_comes_back_without_counts() -> None:
    with ScriptedEngine.start(SLOW, max_running=1) as engine:

        async def work(pool: EnginePool) -> None:
            calls = await start_many(pool, 3)
            await pool.abort(["r2"])
            completion = await calls[2]
            assert completion.finish == "abort"
            assert completion.prompt_tokens is None
            assert len(completion.output_ids) == 0
            await pool.abort(["r0", "r1"])
            await asyncio.gather(*calls)

        run_with(engine, work)


@pytest.mark.parametrize("protocol", ["0.5.15", "0.5.23"])
def test_an_abort_lost_at_the_door_of_a_paused_engine_still_ends_the_call(protocol: Any) -> None:
    with ScriptedEngine.start(SLOW, protocol=protocol, tokens_per_s=20.0, disconnect_abort_s=0.1) as engine:

        async def work(pool: EnginePool) -> None:
            post(engine, "/pause_generation", {"mode": "in_place"})
            call = asyncio.create_task(ask(pool))
            await until(lambda: engine.state()["num_at_door"] == 1)
            await pool.abort(["r"])
            await asyncio.sleep(0.1)
            post(engine, "/continue_generation", {})
            assert (await asyncio.wait_for(call, 3)).finish == "abort"
            await until(lambda: engine.state()["num_running"] == 0)

        run_with(engine, work)


@pytest.mark.parametrize(
    ("mode", "protocol"), [("in_place", "0.5.15"), ("in_place", "0.5.23"), ("retract", "0.5.23")]
)
def test_an_update_in_mid_answer_is_told_per_token_where_the_engine_tells_it(
    mode: str, protocol: Any, tmp_path: Path
) -> None:
    with ScriptedEngine.start(SLOW, protocol=protocol) as engine:

        async def work(pool: EnginePool) -> None:
            assert pool.engines[0].has_spans is (protocol == "0.5.23")
            assert pool.engines[0].version_label == "default"
            calls = await start_many(pool, 4)
            await pool.pause(mode)
            await pool.weights.load(str(tmp_path), "0:1")
            await pool.continue_()
            assert await pool.weights.versions() == {engine.url: "0:1"}
            for call in calls:
                completion = await call
                labels = [label for label, _ in completion.versions]
                if protocol == "0.5.23":
                    assert labels == ["default", "0:1"]
                    assert 10 < completion.versions[0][1] < 60
                    assert_true(completion)
                else:
                    assert labels == ["0:1"]
                    assert not completion.has_spans

        run_with(engine, work)
        (update,) = sent(engine, "/update_weights_from_disk")
        assert update.body["flush_cache"] is False
        assert update.body["abort_all_requests"] is False
        assert len(sent(engine, "/flush_cache")) == (mode == "retract")


def test_old_engines_that_hold_requests_refuse_new_weights_and_live(tmp_path: Path) -> None:
    with ScriptedEngine.start(SLOW, protocol="0.5.15") as engine:

        async def work(pool: EnginePool) -> None:
            calls = await start_many(pool, 2)
            await pool.pause("retract")
            with pytest.raises(ControlFailed, match="must empty its prefix cache before new weights"):
                await pool.weights.load(str(tmp_path), "0:1")
            await pool.continue_()
            for call in calls:
                assert (await call).versions == (("default", 100),)

        run_with(engine, work)
        assert not sent(engine, "/update_weights_from_disk")


def test_a_pause_by_abort_ends_what_runs_and_holds_what_comes() -> None:
    with ScriptedEngine.start(SLOW) as engine:

        async def work(pool: EnginePool) -> None:
            calls = await start_many(pool, 4)
            await pool.pause("abort")
            for call in calls:
                assert (await call).finish == "abort"
            late = asyncio.create_task(ask(pool, "r-late"))
            await asyncio.sleep(0.1)
            assert len(sent(engine)) == 4
            await pool.continue_()
            assert_true(await late)

        run_with(engine, work)


def test_a_pause_longer_than_every_deadline_is_no_failure() -> None:
    with ScriptedEngine.start(SLOW) as engine:

        async def work(pool: EnginePool) -> None:
            calls = await start_many(pool, 4)
            waiting = asyncio.create_task(ask(pool, "r-waits"))
            await pool.pause("in_place")
            await asyncio.sleep(1.5)
            await pool.continue_()
            for call in [*calls, waiting]:
                completion = await call
                assert completion.finish == "stop"
                assert_true(completion)
            assert pool.statistics().lanes[0].failures == {}
            assert pool.statistics().paused_s > 1.4

        run_with(engine, work, max_concurrent_samples=4, policy=quick(request_timeout_s=1.0))
        assert len(sent(engine)) == 5


@pytest.mark.parametrize("protocol", ["0.5.15", "0.5.23"])
def test_a_pause_by_somebody_else_longer_than_the_deadline_is_no_failure(protocol: Any) -> None:
    with ScriptedEngine.start(SLOW, protocol=protocol, health_timeout_s=0.2) as engine:

        async def work(pool: EnginePool) -> None:
            calls = await start_many(pool, 4)
            post(engine, "/pause_generation", {"mode": "in_place"})
            await asyncio.sleep(1.2)
            post(engine, "/continue_generation", {})
            for call in calls:
                assert (await call).finish == "stop"
            assert pool.statistics().lanes[0].failures == {}
            assert pool.statistics().num_orphans_aborted == 0

        run_with(engine, work, policy=quick(request_timeout_s=0.7))
        assert len(sent(engine)) == 4


def test_a_pause_by_somebody_else_that_does_not_end_is_given_up() -> None:
    with ScriptedEngine.start(SLOW) as engine:

        async def work(pool: EnginePool) -> None:
            calls = await start_many(pool, 2)
            post(engine, "/pause_generation", {"mode": "in_place"})
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(r, TimeoutError) for r in results)

        policy = quick(request_timeout_s=0.3, foreign_pause_s=0.3, abort_grace_s=0.1, max_attempts=1)
        run_with(engine, work, policy=policy)


def test_a_version_label_is_set_without_ending_a_request_and_not_where_it_is_right() -> None:
    with ScriptedEngine.start(SLOW) as engine:

        async def work(pool: EnginePool) -> None:
            calls = await start_many(pool, 4)
            await pool.weights.set_label("0:0")
            await pool.weights.set_label("0:0")
            assert [(await call).finish for call in calls] == ["stop"] * 4

        run_with(engine, work)
        (call,) = sent(engine, "/update_weight_version")
        assert call.body == {"new_version": "0:0", "abort_all_requests": False}


def test_an_engine_that_does_not_load_is_an_error_with_its_message(tmp_path: Path) -> None:
    answer = '{"success":false,"message":"no such folder","num_paused_requests":0}'
    for status in (200, 400):
        rule = Rule(path="/update_weights_from_disk", status=status, body=answer)
        with ScriptedEngine.start(SLOW, rules=[rule]) as engine:

            async def work(pool: EnginePool) -> None:
                with pytest.raises(ControlFailed, match="no such folder"):
                    await pool.weights.load(str(tmp_path), "0:1")

            run_with(engine, work)


def test_requests_of_a_client_that_has_hung_up_hold_an_update_up_and_no_more(tmp_path: Path) -> None:
    """As those of a killed life of the generator."""
    with ScriptedEngine.start(SLOW, protocol="0.5.15", disconnect_abort_s=1.0) as engine:

        async def work(pool: EnginePool) -> None:
            ask_and_hang_up(engine)
            await pool.pause("retract")
            assert engine.state()["num_waiting"] == 1
            await pool.weights.load(str(tmp_path), "0:1")
            await pool.continue_()
            assert await pool.weights.versions() == {engine.url: "0:1"}

        run_with(engine, work)


def test_an_engine_that_wants_an_update_announced_gets_it_announced(tmp_path: Path) -> None:
    text = '{"success": false, "message": "update_weights_from_disk must run between the two"}'
    rule = Rule(path="/update_weights_from_disk", status=400, body=text, times=1)
    with ScriptedEngine.start(SLOW, rules=[rule]) as engine:

        async def work(pool: EnginePool) -> None:
            await pool.weights.load(str(tmp_path), "0:1")
            assert await pool.weights.versions() == {engine.url: "0:1"}

        run_with(engine, work)
        update = "/update_weights_from_disk"
        posts = [r.path for r in engine.requests() if r.method == "POST" and r.path != "/generate"]
        assert posts == [update, "/begin_weight_update", update, "/end_weight_update"]


def test_an_engine_that_refuses_to_pause_leaves_none_paused() -> None:
    refuses = Rule(path="/pause_generation", status=500, body="no")
    with ScriptedEngine.start(SLOW) as good, ScriptedEngine.start(SLOW, rules=[refuses]) as bad:

        async def work(pool: EnginePool) -> None:
            with pytest.raises(ControlFailed, match="500 no"):
                await pool.pause("retract")
            assert good.state()["pause_mode"] is None
            assert not pool.statistics().is_paused
            results = await ask_many(pool, 4)
            assert all(isinstance(r, Completion) for r in results)

        run_with([good.url, bad.url], work)


def test_an_engine_started_anew_gets_the_current_weights_before_any_request(tmp_path: Path) -> None:
    with ScriptedEngine.start(SLOW) as stays, ScriptedEngine.start(SLOW) as first_life:
        port = int(first_life.url.rsplit(":", 1)[1])

        async def work(pool: EnginePool) -> None:
            await pool.weights.load(str(tmp_path), "0:1")
            first_life.stop()
            await pool.pause("retract")  # it is lost here, and the others go on
            await pool.weights.load(str(tmp_path), "0:2")
            await pool.continue_()
            assert_true(await ask(pool, "r0"))
            with ScriptedEngine.start(SLOW, port=port) as second_life:
                await until(lambda: {lane.circuit for lane in pool.statistics().lanes} == {"closed"})
                completions = await ask_many(pool, 20)
                assert {c.engine for c in completions if isinstance(c, Completion)} == set(pool_urls)
                paths = [r.path for r in second_life.requests()]
                assert paths.index("/update_weights_from_disk") < paths.index("/generate")
                assert await pool.weights.versions() == dict.fromkeys(pool_urls, "0:2")

        pool_urls = [stays.url, first_life.url]
        run_with(pool_urls, work)


def test_engines_that_this_pool_paused_go_on_when_it_is_closed() -> None:
    with ScriptedEngine.start(SLOW) as engine:
        run_with(engine, lambda pool: pool.pause("retract"))
        assert engine.state()["pause_mode"] is None


def test_no_control_call_ever_aborts_what_is_not_ours(tmp_path: Path) -> None:
    with ScriptedEngine.start(SLOW) as engine:

        async def work(pool: EnginePool) -> None:
            calls = await start_many(pool, 3)
            await pool.pause("retract")
            await pool.weights.load(str(tmp_path), "0:1")
            await pool.weights.set_label("0:2")
            await pool.continue_()
            await pool.abort(["r0"])
            await asyncio.gather(*calls)

        run_with(engine, work)
        for request in engine.requests():
            assert not request.body.get("abort_all")
            assert not request.body.get("abort_all_requests")
            assert request.body.get("mode") != "abort"


def test_a_burst_stops_leaving_when_the_engines_are_paused() -> None:
    with ScriptedEngine.start(SLOW) as engine:

        async def work(pool: EnginePool) -> None:
            calls = asyncio.create_task(ask_many(pool, 250))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await pool.pause("retract")
            await asyncio.sleep(0.5)
            num_sent = len(sent(engine))
            assert num_sent < 250
            await asyncio.sleep(0.2)
            assert len(sent(engine)) == num_sent
            await pool.continue_()
            for result in await calls:
                assert isinstance(result, Completion)
                assert_true(result)

        run_with(engine, work)


def test_a_call_may_be_aborted_again_while_it_ends() -> None:
    with ScriptedEngine.start(SLOW) as engine:

        async def work(pool: EnginePool) -> None:
            calls = await start_many(pool, 3)
            for _ in range(6):
                await pool.abort(["r0", "r1", "r2"])
                await asyncio.sleep(0)
            for call in calls:
                assert (await call).finish == "abort"

        run_with(engine, work, max_concurrent_samples=1)


def test_an_engine_that_comes_back_during_an_update_gets_the_new_weights(tmp_path: Path) -> None:
    with ScriptedEngine.start(SLOW, update_s=0.8) as stays, ScriptedEngine.start(SLOW) as first_life:
        port = int(first_life.url.rsplit(":", 1)[1])

        async def work(pool: EnginePool) -> None:
            await pool.weights.load(str(tmp_path), "0:1")
            first_life.stop()
            await pool.weights.versions()  # finds that it is gone
            updating = asyncio.create_task(pool.weights.load(str(tmp_path), "0:2"))
            with ScriptedEngine.start(SLOW, port=port) as second_life:
                await until(lambda: {lane.circuit for lane in pool.statistics().lanes} == {"closed"})
                await updating
                assert set((await pool.weights.versions()).values()) == {"0:2"}
                assert second_life.state()["weight_version"] == "0:2"

        run_with([stays.url, first_life.url], work)


def test_workers_that_we_paused_continue_although_their_router_is_away() -> None:
    with ScriptedEngine.start(SLOW) as first, ScriptedEngine.start(SLOW) as second:
        workers = [first, second]
        router = ScriptedEngine.start(Script(workers=[worker.url for worker in workers]))

        async def work(pool: EnginePool) -> None:
            await pool.pause("retract")
            assert [worker.state()["pause_mode"] for worker in workers] == ["retract"] * 2
            router.stop()
            await pool.continue_()
            assert [worker.state()["pause_mode"] for worker in workers] == [None] * 2

        run_with([router.url], work, router=True, policy=quick(control_timeout_s=0.5))


@pytest.mark.parametrize("fault", [{"status": 500}, {"silent": True}])
def test_an_engine_that_does_not_continue_is_asked_until_it_does_while_the_other_works(
    fault: dict[str, Any],
) -> None:
    rule = Rule(path="/continue_generation", times=4, **fault)
    with ScriptedEngine.start(SLOW) as good, ScriptedEngine.start(SLOW, rules=[rule]) as bad:

        async def work(pool: EnginePool) -> None:
            await pool.pause("retract")
            with pytest.raises(ControlFailed):
                await pool.continue_()
            assert (await ask(pool, "r0")).engine == good.url
            await until(lambda: bad.state()["pause_mode"] is None)
            await until(lambda: {lane.circuit for lane in pool.statistics().lanes} == {"closed"})

        run_with([good.url, bad.url], work, policy=quick(control_try_s=0.2))


def test_a_new_life_insists_that_engines_left_paused_continue() -> None:
    rule = Rule(path="/continue_generation", status=500, times=3)
    with ScriptedEngine.start(SLOW, rules=[rule]) as engine:
        post(engine, "/pause_generation", {"mode": "retract"})
        assert run_with(engine, ask, takes_over=True).finish == "stop"
