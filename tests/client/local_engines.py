"""Scripted engines in the test's own process, without sockets and on a virtual clock."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from fa_rollout.client.base.errors import ControlFailed, ControlUnanswered, FailureClass
from fa_rollout.client.base.policy import classify_status
from fa_rollout.client.engine.endpoints import Engine, HttpFailure
from tests.generator.virtual import VirtualLoop
from tests.kit.scripted import Script
from tests.kit.scripted.server import EngineServer
from tests.kit.scripted.wire import Exchange

T = TypeVar("T")


class _Call(Exchange):
    """One request, whose answer is a future."""

    def __init__(self, method: str, path: str, body: bytes) -> None:
        super().__init__(None, method, path, {}, body)  # type: ignore[arg-type]
        self.answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    def send(self, status: int, body: bytes, kind: str = "application/json", **_: Any) -> None:
        if self._close() and not self.answer.done():
            self.answer.set_result((status, body))

    def drop(self) -> None:
        if self._close() and not self.answer.done():
            self.answer.set_exception(ConnectionResetError("dropped"))


class LocalEngines:
    """Engines by address."""

    def __init__(self, scripts: dict[str, Script]) -> None:
        self.servers = {url: EngineServer(script) for url, script in scripts.items()}

    async def ask(self, url: str, method: str, path: str, body: bytes, limit_s: float | None) -> Any:
        call = _Call(method, path, body)
        self.servers[url].handle(call)
        try:
            async with asyncio.timeout(limit_s):
                return await call.answer
        except BaseException:
            call.lost()
            raise

    @contextmanager
    def reached(self) -> Iterator[None]:
        """The client's calls come here."""
        engines = self

        async def exchange(engine: Engine, method: str, path: str, data: Any, limit_s: float) -> Any:
            body = data if isinstance(data, bytes) else data.read() if data is not None else b""
            try:
                return await engines.ask(engine.url, method, path, body, limit_s)
            except TimeoutError as error:
                raise ControlUnanswered(f"{method} {path}: no answer within {limit_s:g} s") from error
            except ConnectionResetError as error:
                raise ControlFailed(f"{method} {path}: {error}") from error

        async def generate(engine: Engine, body: bytes, *_: Any) -> bytes:
            try:
                status, answer = await engines.ask(engine.url, "POST", "/generate", body, None)
            except ConnectionResetError as error:
                raise HttpFailure(FailureClass.TRANSIENT, str(error), may_run=True) from error
            if status != 200:
                raise HttpFailure(classify_status(status), answer.decode())
            assert isinstance(answer, bytes)
            return answer

        with patch.object(Engine, "_exchange", exchange), patch.object(Engine, "generate", generate):
            yield


def run_virtually(work: Callable[[], Awaitable[T]]) -> T:
    """Run it on a clock that jumps."""
    loop = VirtualLoop()
    try:
        with patch.object(time, "monotonic", loop.time):
            return loop.run_until_complete(_as_coroutine(work))
    finally:
        loop.close()


async def _as_coroutine(work: Callable[[], Awaitable[T]]) -> T:
    return await work()
