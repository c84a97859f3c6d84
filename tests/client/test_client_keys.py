"""Keys of engines and reward servers come from the environment, and go to them alone."""

import asyncio

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from fa_rollout.client.base.patience import Patience
from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.client.engine import network
from fa_rollout.rewards import remote
from fa_rollout.sample import Sample
from fa_rollout.user_code.deadline import Deadline


async def told(request: web.Request) -> web.Response:
    return web.json_response(request.headers.get("Authorization", "none"))


def server() -> TestServer:
    application = web.Application()
    application.router.add_route("*", "/", told)
    return TestServer(application)


@pytest.mark.parametrize(("key", "header"), [("secret", "Bearer secret"), ("", "none")])
def test_an_engine_is_told_its_key(key: str, header: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(network.KEY_VARIABLE, key)
    monkeypatch.setenv(remote.KEY_VARIABLE, "another")

    async def ask() -> str:
        async with (
            server() as engine,
            network.open_session(FailurePolicy()) as session,
            session.get(engine.make_url("/")) as response,
        ):
            found: str = await response.json()
            return found

    assert asyncio.run(ask()) == header


def test_a_reward_server_is_told_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(remote.KEY_VARIABLE, "secret")
    monkeypatch.setenv(network.KEY_VARIABLE, "another")
    sample = Sample(
        group=0,
        member=0,
        attempt=0,
        epoch=0,
        prompt_index=0,
        prompt="p",
        label=None,
        metadata={},
        prompt_ids=np.array([1], np.int32),
    )

    async def ask() -> object:
        async with server() as judge:
            reward = remote.RemoteReward(str(judge.make_url("/")), Patience(5.0))
            try:
                return await reward.ask(sample, Deadline(5.0, "an answer must come in time"))
            finally:
                await reward.aclose()

    assert asyncio.run(ask()) == "Bearer secret"
