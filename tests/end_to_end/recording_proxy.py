"""An engine's address that writes down what the engine answers: the witness of what was really sampled."""

import asyncio
import json
import threading
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web


class RecordingProxy:
    """Passes every call on to `target` and keeps the answers of `/generate`."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.answers: list[tuple[list[int], list[int]]] = []
        """Prompt ids as they were asked for, and output ids."""
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="recording-proxy")

    async def _pass_on(self, request: web.Request) -> web.Response:
        body = await request.read()
        call = self._session.request(
            request.method, self._target + str(request.rel_url), data=body, headers=_kept(request)
        )
        async with call as answer:
            payload = await answer.read()
        if request.path == "/generate" and answer.status == 200:
            self._record(json.loads(body), json.loads(payload))
        return web.Response(body=payload, status=answer.status, content_type=answer.content_type)

    def _record(self, asked: dict[str, Any], answer: dict[str, Any]) -> None:
        self.answers.append((asked["input_ids"], answer["output_ids"]))

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0]
        self.url = f"http://{host}:{port}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(timeout=30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()


def _kept(request: web.Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name.lower() == "content-type"}
