"""One failure policy: what is tried again, how often, where, and when it is given up."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from fa_rollout.client import (
    Completion,
    EnginePool,
    EngineUnavailable,
    FailureClass,
    InvalidReply,
    RequestFailed,
    RequestRefused,
)
from tests.client.client_kit import PROMPT, ask, ask_many, assert_true, body, quick, run_with, sent, until
from tests.kit.scripted import Lengths, Rule, Script, ScriptedEngine


def faulty(*rules: Rule, **settings: Any) -> ScriptedEngine:
    """An engine with these faults for samples; the ids of samples begin with an r, the probe's does not."""
    return ScriptedEngine.start(Script(lengths=Lengths(tokens=8)), rules=list(rules), **settings)


def verdict(code: Any, message: str = "said so") -> dict[str, Any]:
    """A finish reason that tells an error."""
    return {"type": "abort", "message": message, "status_code": code, "err_type": "Error"}


def overload(**changes: Any) -> Rule:
    return Rule(
        rid="-r", status=503, body='{"object":"error","message":"The request queue is full."}', **changes
    )


def test_an_overload_is_tried_again_until_it_is_over() -> None:
    with faulty(overload(times=3)) as engine:
        completion = run_with(engine, ask)
        assert_true(completion)
        rids = [r.rid for r in sent(engine)]
        assert len(rids) == len(set(rids)) == 4


def test_an_engine_that_says_when_to_come_again_is_left_alone_until_then() -> None:
    with faulty(overload(times=1, retry_after_s=1)) as engine:

        async def work(pool: EnginePool) -> None:
            first = asyncio.create_task(ask(pool, "r1"))
            await until(lambda: bool(sent(engine)))
            await asyncio.sleep(0.1)
            assert_true(await ask(pool, "r2"))
            assert_true(await first)

        run_with(engine, work, policy=quick(backoff_cap_s=5.0))
        refused, *others = (r.time_s for r in sent(engine))
        assert len(others) == 2
        assert min(others) >= refused + 0.99


def test_what_the_engine_refuses_is_sent_once_and_opens_no_circuit() -> None:
    with faulty(Rule(rid="-r", status=400, body='{"error":{"message":"too long"}}', times=20)) as engine:

        async def work(pool: EnginePool) -> list[Completion | BaseException]:
            refused = await ask_many(pool, 20)
            assert all(isinstance(r, RequestRefused) for r in refused)
            assert "too long" in str(refused[0])
            assert engine.url in str(refused[0])
            return [await ask(pool)]

        assert_true(run_with(engine, work, policy=quick(circuit_failures=2))[0])  # type: ignore[arg-type]
        assert len(sent(engine)) == 21


def test_an_id_that_a_router_sent_twice_is_let_go_of_and_another_is_sent() -> None:
    said = '{"error":{"message":"Duplicate request ID detected: x"}}'
    with faulty(Rule(rid="-r", status=400, body=said, times=1)) as engine:

        async def work(pool: EnginePool) -> Completion:
            completion = await ask(pool)
            await until(lambda: bool(sent(engine, "/abort_request")))
            return completion

        assert_true(run_with(engine, work))
        first, second = (r.rid for r in sent(engine))
        assert first != second
        assert [r.body["rid"] for r in sent(engine, "/abort_request")] == [first]


def test_a_socket_that_the_server_dropped_when_idle_costs_nothing() -> None:
    with faulty(idle_timeout_s=0.3) as engine:

        async def work(pool: EnginePool) -> None:
            await ask(pool, "r1")
            await asyncio.sleep(0.4)
            await ask(pool, "r2")

        run_with(engine, work)
        assert len(sent(engine)) == 2


def test_refusals_at_once_come_again_spread_out() -> None:
    with faulty(overload(times=200)) as engine:
        policy = quick(overload_base_s=2.0, backoff_cap_s=4.0)
        results = run_with(engine, lambda pool: ask_many(pool, 200), policy=policy)
        assert all(isinstance(r, Completion) for r in results)
        retries = sorted(r.time_s for r in sent(engine))[200:]
        assert retries[-1] - retries[0] > 1.0


@pytest.mark.parametrize(
    ("rule", "failure"),
    [
        (overload(), FailureClass.OVERLOAD),
        (Rule(rid="-r", status=500, body="broken"), FailureClass.TRANSIENT),
        (Rule(rid="-r", drop="before"), FailureClass.TRANSIENT),
        (Rule(rid="-r", drop="middle"), FailureClass.TRANSIENT),
        (Rule(rid="-r", abort_after=0, finish=verdict(503)), FailureClass.OVERLOAD),
        (Rule(rid="-r", body='{"error":{"message":"broken","code":500}}'), FailureClass.TRANSIENT),
    ],
)
def test_a_condition_of_the_server_is_borne_for_as_long_as_a_dead_engine_and_blamed_on_it(
    rule: Rule, failure: FailureClass
) -> None:
    with faulty(rule) as engine:

        async def work(pool: EnginePool) -> None:
            results = await ask_many(pool, 3)
            assert [type(r) for r in results] == [EngineUnavailable] * 3
            assert engine.url in str(results[0])
            (lane,) = pool.statistics().lanes
            assert set(lane.failures) == {failure}
            assert lane.failing_s > 0.5
            assert pool.statistics().num_in_flight == 0

        run_with(
            engine, work, policy=quick(unavailable_timeout_s=0.8, circuit_failures=1000, backoff_cap_s=0.2)
        )
        assert len(sent(engine)) > 3 * 4


@pytest.mark.parametrize("code", [400, "400", 404, 413, 422])
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_refusal_inside_of_an_answer_is_final_and_told_in_the_engines_words(
    code: Any, num_tokens: int
) -> None:
    finish = verdict(code, "The input is longer than the context.")
    with faulty(Rule(rid="-r", abort_after=num_tokens, finish=finish)) as engine:

        async def work(pool: EnginePool) -> None:
            with pytest.raises(RequestRefused, match="longer than the context"):
                await ask(pool)

        run_with(engine, work)
        assert len(sent(engine)) == 1


@pytest.mark.parametrize("code", [429, 503, 500, 502])
def test_tokens_from_before_a_condition_of_the_server_are_kept_as_those_of_an_abort(code: int) -> None:
    with faulty(Rule(rid="-r", abort_after=3, finish=verdict(code))) as engine:

        async def work(pool: EnginePool) -> None:
            completion = await ask(pool)
            assert (completion.finish, len(completion.output_ids)) == ("abort", 3)
            assert_true(completion)
            assert sum(pool.statistics().lanes[0].failures.values()) == 1

        run_with(engine, work)


def test_a_request_that_none_answers_while_others_are_answered_is_given_up_alone() -> None:
    with faulty(Rule(rid="-rpoison", status=500, body="broken by it")) as engine:

        async def work(pool: EnginePool) -> None:
            call = asyncio.create_task(ask(pool, "rpoison"))
            while not call.done():
                assert_true(await ask(pool, "rgood"))
                await asyncio.sleep(0.02)
            with pytest.raises(RequestFailed, match="broken by it; others were answered meanwhile"):
                await call

        run_with(engine, work, policy=quick(unavailable_timeout_s=1.0))


def test_prompts_of_an_abort_without_tokens_are_not_compared() -> None:
    for rule in (
        Rule(abort_after=0, meta={"prompt_tokens": 0}),
        Rule(abort_after=0, lacks=["prompt_tokens"]),
    ):
        with faulty(msgspec.structs.replace(rule, rid="-r")) as engine:
            completion = run_with(engine, ask)
            assert (completion.finish, len(completion.output_ids)) == ("abort", 0)


@pytest.mark.parametrize("drop", ["before", "middle"])
def test_a_dropped_connection_is_tried_again_and_the_old_attempt_is_ended_by_its_own_id(drop: Any) -> None:
    with faulty(Rule(rid="-r", drop=drop, times=1)) as engine:

        async def work(pool: EnginePool) -> Completion:
            completion = await ask(pool)
            await until(lambda: len(sent(engine, "/abort_request")) == 1)
            assert pool.statistics().num_orphans_aborted == 1
            return completion

        assert_true(run_with(engine, work))
        first, _ = sent(engine)
        assert [r.rid for r in sent(engine, "/abort_request")] == [first.rid]


UNTRUE = [
    *(
        Rule(corrupt=kind)
        for kind in ("null", "nan", "-inf", "positive", "short", "absent", "ids", "unfinished")
    ),
    Rule(body=""),
    Rule(body="<html>busy</html>"),
    Rule(body='{"error":"it did not work"}'),
    Rule(meta={"id": "another"}),
    Rule(meta={"completion_tokens": 5}),
    Rule(meta={"prompt_tokens": 1}),
    Rule(last_id=4294967297),
    Rule(last_id=2**70),
    Rule(gzip_bytes=1 << 26),
    Rule(endless=True),
    Rule(status=307, location="http://127.0.0.1:9/generate"),
    Rule(status=401, body="no key"),
]


@pytest.mark.parametrize("rule", UNTRUE)
def test_an_untrue_answer_is_asked_for_once_more_of_another_engine(rule: Rule) -> None:
    with faulty(msgspec.structs.replace(rule, rid="-r")) as liar, faulty() as good:

        async def work(pool: EnginePool) -> None:
            results = await ask_many(pool, 4)
            for result in results:
                assert isinstance(result, Completion)
                assert_true(result)
                assert result.engine == good.url
            lane = next(lane for lane in pool.statistics().lanes if lane.url == liar.url)
            assert set(lane.failures) == {FailureClass.INVALID}
            assert len(sent(liar)) == lane.failures[FailureClass.INVALID]
            assert len(sent(good)) == 4

        run_with([liar.url, good.url], work)


def test_an_untrue_answer_costs_no_request_while_the_other_engine_is_away() -> None:
    with faulty(Rule(rid="-r", corrupt="ids", every=2)) as liar, faulty() as other:

        async def work(pool: EnginePool) -> None:
            other.process.kill()
            results = await ask_many(pool, 12)
            assert [type(result) for result in results] == [Completion] * 12
            assert {result.engine for result in results if isinstance(result, Completion)} == {liar.url}

        run_with([liar.url, other.url], work, policy=quick(max_attempts=2, circuit_failures=1))


def test_a_worker_that_lies_behind_a_router_costs_no_request() -> None:
    with (
        faulty(Rule(rid="-r", corrupt="ids", every=2)) as liar,
        faulty() as good,
        ScriptedEngine.start(Script(workers=[liar.url, good.url])) as router,
    ):

        async def work(pool: EnginePool) -> None:
            results = await ask_many(pool, 32)
            assert [type(result) for result in results] == [Completion] * 32

        run_with([router.url], work, router=True)
        assert len(sent(liar)) + len(sent(good)) > 32


def test_one_engine_alone_is_asked_once_more_and_then_the_reason_is_told() -> None:
    with faulty(Rule(rid="-r", corrupt="nan")) as engine:

        async def work(pool: EnginePool) -> None:
            with pytest.raises(InvalidReply, match=engine.url):
                await ask(pool)
            lane = pool.statistics().lanes[0]
            assert (lane.failures, lane.circuit) == ({FailureClass.INVALID: 2}, "closed")

        run_with(engine, work)
        assert len(sent(engine)) == 2


def test_an_engine_that_keeps_lying_is_taken_out_loudly_and_tried_with_one_request_after_a_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with faulty(Rule(rid="-r", corrupt="nan")) as liar, faulty() as good:

        async def work(pool: EnginePool) -> None:
            async def asked(name: str) -> None:
                for result in await asyncio.gather(*(ask(pool, f"r{name}{i}") for i in range(12))):
                    assert_true(result)

            def state() -> str:
                return next(lane.circuit for lane in pool.statistics().lanes if lane.url == liar.url)

            await asked("a")
            assert state() == "open"
            num_before = len(sent(liar))
            await asked("b")
            assert len(sent(liar)) == num_before
            await until(lambda: state() == "closed")
            await asked("c")
            assert (len(sent(liar)), state()) == (num_before + 1, "open")
            liar.configure(rules=[])
            await until(lambda: state() == "closed")
            await asked("d")
            assert len(sent(liar)) > num_before + 1

        run_with([liar.url, good.url], work, policy=quick(untrue_rest_s=0.3))
        told = [r for r in caplog.records if r.levelname == "ERROR"]
        assert len(told) == 1
        assert liar.url in told[0].getMessage()


def test_an_engine_that_wants_a_key_is_known_at_the_start() -> None:
    for rule in (Rule(path="/model_info", status=401), Rule(status=403, body="forbidden")):
        with faulty(rule) as engine, pytest.raises(EngineUnavailable, match="FA_ROLLOUT_ENGINE_KEY"):
            run_with(engine, ask, policy=quick(start_timeout_s=30.0))


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"meta": {"id": "another"}}, "must be of request .*-r.*, found one of 'another'"),
        ({"meta": {"prompt_tokens": len(PROMPT) - 1}}, f"all {len(PROMPT)} prompt ids, found 39 taken"),
        (
            {"output_ids": [11, 32000], "meta": {"output_token_logprobs": [[-1, 11], [-1, 32000]]}},
            "below 32000, found 32000",
        ),
    ],
)
def test_an_answer_to_another_request_or_prompt_or_of_no_token_of_the_model_is_refused(
    told: Any, reason: str
) -> None:
    meta = {"id": None, "prompt_tokens": len(PROMPT)} | told.get("meta", {})
    with faulty(Rule(rid="-r", body=body(**told | {"meta": meta}).decode())) as engine:

        async def work(pool: EnginePool) -> None:
            with pytest.raises(InvalidReply, match=reason):
                await ask(pool)

        run_with(engine, work, vocab_size=32000)


@pytest.mark.parametrize("corrupt", ["zero", "negative_zero"])
def test_a_log_probability_of_zero_is_legal(corrupt: Any) -> None:
    with faulty(Rule(rid="-r", corrupt=corrupt)) as engine:
        completion = run_with(engine, ask)
        assert 0.0 in completion.logprobs


@pytest.mark.parametrize("ids", [[31999, 32000], [-1, 4], []])
def test_ids_that_would_kill_an_engine_are_never_sent(ids: list[int]) -> None:
    with faulty() as engine:

        async def work(pool: EnginePool) -> None:
            with pytest.raises(RequestRefused, match="input_ids must"):
                await ask(pool, input_ids=np.array(ids, np.int64))

        run_with(engine, work, vocab_size=32000)
        assert sent(engine) == []


def test_requests_move_to_other_engines_when_one_fails() -> None:
    with faulty(Rule(rid="-r", status=500)) as broken, faulty() as good:

        async def work(pool: EnginePool) -> None:
            results = await ask_many(pool, 40)
            for result in results:
                assert isinstance(result, Completion)
                assert_true(result)
                assert result.engine == good.url
            states = {lane.url: lane.circuit for lane in pool.statistics().lanes}
            assert states == {broken.url: "open", good.url: "closed"}
            before = len(sent(broken))
            await ask_many(pool, 40)
            assert len(sent(broken)) == before

        run_with([broken.url, good.url], work, policy=quick(circuit_failures=3, probe_interval_s=60.0))


def test_an_engine_that_comes_back_gets_requests_again() -> None:
    with faulty(Rule(rid="-r", status=502)) as engine:

        async def work(pool: EnginePool) -> None:
            call = asyncio.create_task(ask(pool))
            await until(lambda: pool.statistics().lanes[0].circuit == "open")
            engine.configure(rules=[])
            assert_true(await call)
            assert pool.statistics().lanes[0].circuit == "closed"

        run_with(engine, work, policy=quick(circuit_failures=2, backoff_base_s=0.01))


def test_when_all_engines_are_gone_each_is_named_with_its_last_error() -> None:
    with faulty() as first, faulty() as second:

        async def work(pool: EnginePool) -> None:
            assert_true(await ask(pool, "r0"))
            first.stop()
            second.stop()
            results = await ask_many(pool, 10)
            assert {type(r) for r in results} == {EngineUnavailable}
            for engine in (first, second):
                assert engine.url in str(results[0])
            assert "Connect" in str(results[0])
            with pytest.raises(EngineUnavailable):  # no fresh wait while the outage lasts
                await asyncio.wait_for(ask(pool, "late"), 0.2)

        policy = quick(circuit_failures=2, unavailable_timeout_s=0.5, backoff_base_s=0.01)
        run_with([first.url, second.url], work, policy=policy)


def test_an_engine_that_is_not_up_at_the_start_is_named() -> None:
    with faulty() as engine:

        async def start() -> None:
            async with EnginePool([engine.url, "127.0.0.1:9"], policy=quick(start_timeout_s=0.7)):
                pass

        with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:9") as caught:
            asyncio.run(start())
        assert engine.url not in str(caught.value)


def test_a_slow_start_is_waited_for() -> None:
    with faulty(Rule(path="/model_info", status=503, body="loading", times=2)) as engine:
        assert_true(run_with(engine, ask))


def test_an_identifier_in_use_is_refused() -> None:
    with faulty(Rule(rid="-r", delay_s=0.3)) as engine:

        async def work(pool: EnginePool) -> None:
            call = asyncio.create_task(ask(pool, "r-same"))
            await asyncio.sleep(0.05)
            with pytest.raises(ValueError, match="'r-same' in use"):
                await ask(pool, "r-same")
            await call

        run_with(engine, work)
