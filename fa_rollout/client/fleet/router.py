"""The list of workers that a router keeps.

In: SGLang's router. Out: whom it knows, and whom it passes requests on to.
"""

import asyncio
import os
import time

import msgspec

from fa_rollout.client.base.errors import ControlFailed
from fa_rollout.client.engine.endpoints import Engine
from fa_rollout.client.wire.address import AddressError, engine_url
from fa_rollout.engines.with_key import KEY_VARIABLE

_LOOK_S = 0.2


class _Worker(msgspec.Struct):
    """An entry of a router's list."""

    url: str
    id: str = ""
    is_healthy: bool = True


class Router:
    """A router in front of all engines."""

    def __init__(self, front: Engine) -> None:
        """`front`: its own endpoints."""
        self.front = front
        self.url = front.url

    async def urls(self) -> list[str]:
        """Addresses of its workers, healthy or not.

        Raises:
            ControlFailed: it does not answer, or lists none, as it may while its workers are paused.
        """
        urls = [worker.url for worker in await self._workers()]
        if not urls:
            raise ControlFailed(f"the router {self.url} has no workers; start engines and register them")
        return urls

    async def has_healthy_workers(self) -> bool:
        """Whether it would pass a request on."""
        try:
            return any(worker.is_healthy for worker in await self._workers())
        except ControlFailed:
            return False

    async def until_healthy(self, limit_s: float) -> None:
        """It answers 503 until its next health check has seen that a worker runs again."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            if await self.has_healthy_workers():
                return
            await asyncio.sleep(_LOOK_S)

    async def add(self, url: str) -> None:
        """Add a worker, with the key, which a router does not give to workers that come without one."""
        key = os.environ.get(KEY_VARIABLE)
        await self.front.call("POST", "/workers", {"url": url} | ({"api_key": key} if key else {}))

    async def remove(self, url: str) -> None:
        """It begins no request there any more; harmless when it never did.

        Raises:
            ControlFailed: it does not answer.
        """
        for worker in await self._workers():
            if worker.url == url:
                await self.front.call("DELETE", f"/workers/{worker.id}")

    async def _workers(self) -> list[_Worker]:
        answer = await self.front.call("GET", "/workers")
        try:
            workers = msgspec.convert(answer.get("workers"), list[_Worker])
            return [msgspec.structs.replace(worker, url=engine_url(worker.url)) for worker in workers]
        except (msgspec.ValidationError, AddressError) as error:
            raise ControlFailed(f"{self.url}/workers must list urls, found {answer}: {error}") from error
