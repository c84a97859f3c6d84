"""A plain HTTP client for the tests of the scripted engine: none of the product's client is in the way."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp

from tests.kit.scripted import ScriptedEngine

T = TypeVar("T")

PROMPT = list(range(10, 60))


class Plain:
    """Calls to one engine."""

    def __init__(self, session: aiohttp.ClientSession, engine: ScriptedEngine) -> None:
        self._session = session
        self.engine = engine

    async def post(self, path: str, value: Any) -> tuple[int, Any]:
        """Status and JSON (text, when it is none)."""
        async with self._session.post(self.engine.url + path, json=value) as response:
            return response.status, await _content(response)

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON (text, when it is none)."""
        async with self._session.get(self.engine.url + path) as response:
            return response.status, await _content(response)

    async def generate(self, rid: str, **sampling: Any) -> dict[str, Any]:
        """One sample's answer."""
        status, answer = await self.post("/generate", request(rid, **sampling))
        assert status == 200, answer
        found: dict[str, Any] = answer
        return found

    def begin(self, rid: str, **sampling: Any) -> "asyncio.Task[dict[str, Any]]":
        """One sample in the background."""
        return asyncio.create_task(self.generate(rid, **sampling))

    async def state(self, **wanted: Any) -> None:
        """Wait until the engine's state has these values."""
        async with asyncio.timeout(10):
            while True:
                _, state = await self.get("/_scripted/state")
                if {name: state[name] for name in wanted} == wanted:
                    return
                await asyncio.sleep(0.01)


async def _content(response: aiohttp.ClientResponse) -> Any:
    return await (response.json() if response.content_type == "application/json" else response.text())


def request(rid: str, input_ids: list[int] | None = None, **sampling: Any) -> dict[str, Any]:
    """The body of a /generate request."""
    return {
        "rid": rid,
        "input_ids": PROMPT if input_ids is None else input_ids,
        "sampling_params": {"max_new_tokens": 1 << 16} | sampling,
        "return_logprob": True,
    }


def run_with(engine: ScriptedEngine, work: Callable[[Plain], Awaitable[T]]) -> T:
    """Do the work with a client of this engine."""

    async def main() -> T:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
            return await work(Plain(session, engine))

    return asyncio.run(asyncio.wait_for(main(), 60))
