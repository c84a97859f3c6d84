"""A reward server is asked like a function; what it refuses is a failure, what may pass is tried again."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from reward_kit import failure, make_sample, running, values

from fa_rollout.rewards import remote
from fa_rollout.rewards.outcomes import FailureReason, RewardOutcome, Scored

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
    ("status", "text", "says", "num_requests"),
    [
        (400, "no such field", "1 attempts.*status 400: no such field", 1),
        (503, "busy", "4 attempts.*status 503", 4),
        (429, "", "4 attempts.*status 429", 4),
        (200, "NaN", "must answer with JSON", 1),
        (200, "", "must answer with JSON", 1),
    ],
)
def test_what_is_no_reward_is_a_failure_and_only_what_may_pass_is_tried_again(
    status: int, text: str, says: str, num_requests: int
) -> None:
    requests = []

    def answer(body: Any) -> web.Response:
        requests.append(body)
        return web.Response(status=status, text=text)

    (outcome,) = scored_by(answer, num_samples=1)
    assert failure(outcome).reason is FailureReason.RAISED
    assert re.search(says, failure(outcome).text), outcome
    assert len(requests) == num_requests


def test_a_server_that_comes_back_gives_its_reward() -> None:
    requests = []

    def answer(body: Any) -> web.Response:
        requests.append(body)
        return web.json_response(1) if len(requests) > 2 else web.Response(status=502)

    assert values(scored_by(answer, num_samples=1)) == [1.0]


def test_a_server_that_is_silent_or_not_there_costs_the_sample_in_time() -> None:
    async def sleep(body: Any) -> web.Response:
        await asyncio.sleep(600)
        return web.json_response(1)

    assert values(scored_by(sleep, timeout_s=0.1)) == [FailureReason.TIMEOUT] * 2

    async def run() -> None:
        async with running("http://127.0.0.1:9/score") as runner:
            (outcome,) = await runner.score([make_sample()])
            assert "ClientConnectorError" in failure(outcome).text

    asyncio.run(run())


def test_metadata_that_is_no_json_is_a_failure() -> None:
    async def run() -> None:
        async with running("http://127.0.0.1:9/score") as runner:
            (outcome,) = await runner.score([make_sample(thing=object())])
            assert failure(outcome).reason is FailureReason.RAISED

    asyncio.run(run())
