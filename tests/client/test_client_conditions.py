"""Whatever a server goes through within patience, no request fails, and each is answered once."""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa_rollout.client import EnginePool
from tests.client.client_kit import ask, body, quick

NUM_REQUESTS = 6


def told(code: int, num_tokens: int) -> Callable[[str], web.Response]:
    """A verdict inside a 200, before any token or behind two of them."""
    finish = {"type": "abort", "message": "x", "status_code": code, "err_type": "E"}

    def answer(rid: str) -> web.Response:
        meta: dict[str, Any] = {"id": rid, "finish_reason": finish, "prompt_tokens": 40}
        if num_tokens:
            return web.Response(body=body(meta=meta))
        lists = {"output_token_logprobs": None, "completion_tokens": 0}
        return web.Response(body=body(output_ids=[], meta=meta | lists))

    return answer


def status(code: int) -> Callable[[str], web.Response]:
    headers = {"Retry-After": "0"} if code in (429, 503) else None
    return lambda rid: web.Response(status=code, text="trouble", headers=headers)


def cut(rid: str) -> None:
    """The connection is reset."""


PLAYS: dict[str, Callable[[str], web.Response | None]] = {
    **{str(code): status(code) for code in (429, 503, 500, 502, 504)},
    **{f"told {code}": told(code, 0) for code in (429, 503, 500)},
    "error 503": lambda rid: web.Response(text='{"object":"error","message":"full","code":503}'),
    "cut": cut,
}


class Server:
    """Plays one fault a request, then answers truly."""

    def __init__(self, plays: list[str]) -> None:
        self.plays = list(plays)
        self.answered: list[str] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path in ("/model_info", "/server_info"):
            return web.json_response({"weight_version": "7"})
        if request.path != "/generate":
            return web.Response()
        rid = (await request.json())["rid"]
        if "probe" in rid:
            one = {"completion_tokens": 1, "output_token_logprobs": [[-0.5, 11, None]]}
            return web.Response(body=body(output_ids=[11], meta={"id": rid, "prompt_tokens": 1, **one}))
        if self.plays:
            answer = PLAYS[self.plays.pop(0)](rid)
            if answer is not None:
                return answer
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        self.answered.append(rid.rstrip(".").rpartition("-")[2])
        return web.Response(body=body(meta={"id": rid, "prompt_tokens": 40}))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plays=st.lists(st.sampled_from(sorted(PLAYS)), max_size=40))
def test_no_condition_of_a_server_fails_a_request_and_each_is_answered_once(plays: list[str]) -> None:
    async def scenario() -> None:
        server = Server(plays)
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", server.handle)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        quickly = {"backoff_base_s": 0.001, "overload_base_s": 0.001, "backoff_cap_s": 0.005}
        policy = quick(unavailable_timeout_s=20.0, probe_interval_s=0.005, **quickly)
        try:
            async with EnginePool([f"127.0.0.1:{runner.addresses[0][1]}"], policy=policy) as pool:
                answers = await asyncio.gather(*(ask(pool, f"r{i}") for i in range(NUM_REQUESTS)))
                assert [answer.finish for answer in answers] == ["length"] * NUM_REQUESTS
                assert sorted(server.answered) == [f"r{i}" for i in range(NUM_REQUESTS)]
                assert pool.statistics().num_in_flight == 0
        finally:
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(scenario(), 60))
