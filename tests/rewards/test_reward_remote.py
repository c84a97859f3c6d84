"""A reward server is asked like a function; what it refuses is a failure, what may pass is tried again."""

import asyncio
import gzip
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from reward_kit import failure, make_sample, running, values

from fa_rollout.rewards import remote
from fa_rollout.rewards.outcomes import FailureReason, RewardOutcome, Scored
from fa_rollout.rewards.remote import RewardServerLost

Answer = Callable[[Any], web.Response | Awaitable[web.Response]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.Response:
        given = answer(await request.json())
        return given if isinstance(given, web.Response) else await given

    application = web.Application()
    application.router.add_post("/score", handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/score"
    finally:
        await runner.cleanup()


def scored_by(answer: Answer, *, num_samples: int = 2, **options: Any) -> list[RewardOutcome]:
    async def run() -> list[RewardOutcome]:
        async with serving(answer) as url, running(url, **options) as runner:
            return await runner.score(
                [make_sample(m, label=[1], response="ab", x=m) for m in range(num_samples)]
            )

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def _quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(remote, "BACKOFF_CAP_S", 0.1)


def test_the_server_gets_the_sample_as_json_and_gives_a_number() -> None:
    seen = []

    def answer(body: Any) -> web.Response:
        seen.append(body)
        return web.json_response(body["member"] + 0.5)

    assert values(scored_by(answer)) == [0.5, 1.5]
    assert sorted(seen, key=lambda body: body["member"])[1] == {
        "group": 7, "member": 1, "attempt": 1, "epoch": 0, "prompt_index": 5,
        "prompt": [{"role": "user", "content": "How many?"}], "label": [1], "metadata": {"x": 1},
        "response": "ab", "finish_reason": "stop", "num_tokens": 3,
    }  # fmt: skip


def test_a_server_may_give_an_object_with_a_key_or_a_list_for_a_group() -> None:
    (outcome,) = scored_by(lambda body: web.json_response({"score": 1, "b": 2}), num_samples=1, key="score")
    assert outcome == Scored(value=1.0, parts={"b": 2.0})
    outcomes = scored_by(lambda body: web.json_response([s["member"] for s in body["samples"]]), group=True)
    assert values(outcomes) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [
        (400, "no such field", "status 400: no such field"),
        (401, "who is there", "FA_ROLLOUT_REWARD_KEY"),
        (307, "", "redirects are not followed"),
        (200, "NaN", "must answer with JSON"),
        (200, "", "must answer with JSON"),
        (200, '{"error":{"message":"too long","code":400}}', "400 too long"),
    ],
)
def test_what_the_server_says_against_a_sample_is_its_failure_at_once(
    status: int, text: str, says: str
) -> None:
    requests = []

    def answer(body: Any) -> web.Response:
        requests.append(body)
        return web.Response(status=status, text=text, headers={"Location": "/other"})

    (outcome,) = scored_by(answer, num_samples=1)
    assert failure(outcome).reason is FailureReason.RAISED
    assert re.search(says, failure(outcome).text), outcome
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("status", "text"), [(429, ""), (503, "busy"), (500, ""), (502, ""), (200, '{"error":{"code":503}}')]
)
def test_a_condition_of_the_server_costs_no_sample_however_often_it_is_met(status: int, text: str) -> None:
    requests = []

    def answer(body: Any) -> web.Response:
        requests.append(body)
        return web.json_response(1) if len(requests) > 12 else web.Response(status=status, text=text)

    # Its time-out is shorter than the trouble: a sample's time stands still meanwhile.
    assert values(scored_by(answer, num_samples=1, timeout_s=0.3)) == [1.0]
    assert len(requests) == 13


def test_a_server_that_says_when_to_come_again_is_left_alone_until_then() -> None:
    times: list[float] = []

    def answer(body: Any) -> web.Response:
        times.append(time.monotonic())
        if len(times) > 2:
            return web.json_response(1)
        return web.Response(status=429, headers={"Retry-After": "1"})

    assert values(scored_by(answer)) == [1.0, 1.0]
    assert times[2] >= times[0] + 0.99


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/score", None])
def test_a_server_that_answers_nobody_ends_the_run_in_its_own_name(url: str | None) -> None:
    told: list[str] = []

    async def run() -> None:
        busy = serving(lambda body: web.Response(status=503))
        async with busy as served, running(url or served, patience_s=0.3) as runner:
            runner.warn = told.append
            await runner.score([make_sample()])

    with pytest.raises(RewardServerLost, match="has answered no request for"):
        asyncio.run(run())
    assert len(told) == 1


def test_a_sample_that_breaks_the_server_while_others_are_scored_fails_alone() -> None:
    def answer(body: Any) -> web.Response:
        return web.Response(status=500) if body["member"] == 0 else web.json_response(1)

    async def run() -> None:
        async with serving(answer) as url, running(url, patience_s=0.6) as runner:
            broken = asyncio.create_task(runner.score([make_sample(0)]))
            while not broken.done():
                assert values(await runner.score([make_sample(1)])) == [1.0]
                await asyncio.sleep(0.02)
            assert "answered other samples meanwhile" in failure(broken.result()[0]).text

    asyncio.run(run())


def test_a_server_that_is_silent_costs_the_sample_in_time() -> None:
    async def sleep(body: Any) -> web.Response:
        await asyncio.sleep(600)
        return web.json_response(1)

    assert values(scored_by(sleep, timeout_s=0.1)) == [FailureReason.TIMEOUT] * 2


def test_an_answer_without_end_or_packed_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_ANSWER_BYTES", 1 << 16)
    (outcome,) = scored_by(lambda body: web.Response(body=b" " * (1 << 17)), num_samples=1)
    assert "must end within" in failure(outcome).text
    packed = web.Response(body=gzip.compress(b"1"), headers={"Content-Encoding": "gzip"})
    (outcome,) = scored_by(lambda body: packed, num_samples=1)
    assert "without compression" in failure(outcome).text


def test_metadata_that_is_no_json_is_a_failure() -> None:
    async def run() -> None:
        async with running("http://127.0.0.1:9/score") as runner:
            (outcome,) = await runner.score([make_sample(thing=object())])
            assert failure(outcome).reason is FailureReason.RAISED

    asyncio.run(run())
