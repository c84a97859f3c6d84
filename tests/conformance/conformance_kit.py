"""What the conformance suite shares: the engine under test, plain HTTP calls to it, reference log-probs."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np

from fa_rollout.client import Completion, EnginePool, FailurePolicy
from tests.engines.reference import reference_logprobs

T = TypeVar("T")

CONTEXT = 4096
MAX_RUNNING = 8
PROMPT = [1, 5, 9, 4, 20, 7, 15]
LONG = {"max_new_tokens": 3500, "ignore_eos": True}
"""Takes seconds on every engine; nobody waits for its end but by an abort."""
TOLERANCE = 2e-4
"""Two float32 implementations of the same model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One engine under test, as clients reach it."""

    kind: str
    """`embedded` or `sglang`."""
    url: str
    """Where requests go: the engine, or a router."""
    engine_url: str
    model: Path
    """Folder of the weights at the start."""
    other: Path
    """Folder of the same architecture with other weights."""

    @property
    def is_router(self) -> bool:
        return self.url != self.engine_url

    @property
    def has_spans(self) -> bool:
        """SGLang tells spans from 0.5.19 on."""
        return self.kind == "embedded"

    def with_pool(self, work: Callable[[EnginePool], Awaitable[T]], **settings: Any) -> T:
        """Open a pool, do the work, close it."""

        async def main() -> T:
            changes = {"policy": quick(), "router": self.is_router} | settings
            async with EnginePool([self.url], **changes) as pool:
                return await work(pool)

        return asyncio.run(main())

    def with_http(self, work: Callable[["Http"], Awaitable[T]]) -> T:
        """Open a plain session, do the work, close it."""

        async def main() -> T:
            async with aiohttp.ClientSession(trust_env=False, read_bufsize=1 << 22) as session:
                return await work(Http(session, self))

        return asyncio.run(main())


class Http:
    """Plain calls: requests go to the front, control calls to the engine."""

    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self._session = session
        self._target = target

    async def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        return await self._call("POST", self._target.url + "/generate", json=body)

    async def raw_generate(self, body: bytes) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        return await self._call("POST", self._target.engine_url + "/generate", data=body, headers=headers)

    async def control(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        method = "GET" if body is None else "POST"
        return await self._call(method, self._target.engine_url + path, json=body)

    async def events(self, body: dict[str, Any]) -> list[bytes]:
        """The payloads of a stream."""
        async with self._session.post(
            self._target.url + "/generate", json=body | {"stream": True}
        ) as response:
            assert response.status == 200
            text = await response.read()
        return [event.removeprefix(b"data: ") for event in text.split(b"\n\n") if event]

    async def _call(self, method: str, url: str, **arguments: Any) -> tuple[int, Any]:
        async with self._session.request(method, url, **arguments) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith(("{", "[")) else text


def quick(**changes: Any) -> FailurePolicy:
    """A policy for machines that may be busy, but not dead."""
    settings: dict[str, Any] = {"request_timeout_s": 90.0, "control_timeout_s": 60.0, "abort_grace_s": 5.0}
    return FailurePolicy(**(settings | changes))


def request(rid: str, **sampling: Any) -> dict[str, Any]:
    """The body of a /generate request."""
    return {"rid": rid, "input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}


async def ask(
    pool: EnginePool, rid: str = "r", prompt: Sequence[int] = tuple(PROMPT), **sampling: Any
) -> Completion:
    """One sample."""
    return await pool.generate(rid=rid, input_ids=list(prompt), sampling_params=sampling)


async def under_way(
    pool: EnginePool, count: int, seconds: float = 0.35, **sampling: Any
) -> list["asyncio.Task[Completion]"]:
    """Calls that have made some tokens when this returns."""
    calls = [asyncio.create_task(ask(pool, f"r{i}", **(LONG | sampling))) for i in range(count)]
    await asyncio.sleep(seconds)
    assert not any(call.done() for call in calls)
    return calls


def assert_sampled_by(
    model: Any, completion: Completion, *, temperature: float = 1.0, start: int = 0, end: int | None = None
) -> None:
    """The log-probs of output tokens [start, end) are the model's."""
    expected = reference_logprobs(model, PROMPT, completion.output_ids.tolist(), temperature)
    np.testing.assert_allclose(completion.logprobs[start:end], expected[start:end], atol=TOLERANCE, rtol=0)
