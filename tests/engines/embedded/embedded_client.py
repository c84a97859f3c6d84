"""A client for tests: SGLang's protocol over one aiohttp session."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp


def output_logprobs(reply: dict[str, Any]) -> list[float]:
    items = reply["meta_info"]["output_token_logprobs"]
    assert [item[1] for item in items] == reply["output_ids"]
    return [item[0] for item in items]


class Client:
    """Calls on one engine."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def call(self, path: str, body: Any = None) -> tuple[int, Any]:
        method = "GET" if body is None else "POST"
        async with self.session.request(method, self.url + path, json=body) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def generate(self, **body: Any) -> Any:
        status, reply = await self.call("/generate", body)
        assert status == 200, reply
        return reply

    async def stream(self, **body: Any) -> AsyncIterator[dict[str, Any]]:
        body["stream"] = True
        async with self.session.post(self.url + "/generate", json=body) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line[len(b"data: ") :])

    async def post(self, path: str, **body: Any) -> Any:
        status, reply = await self.call(path, body)
        assert status == 200, reply
        return reply

    async def statistics(self) -> dict[str, Any]:
        _, info = await self.call("/server_info")
        return info["internal_states"][0]


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[Client]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 22) as session:
        yield Client(session, url)
