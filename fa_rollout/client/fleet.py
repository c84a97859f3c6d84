"""Control calls to every engine of a pool: probe, pause, continue, update, abort, versions.

Behind a router the engines are its workers, since a router has no control endpoints.
Invariant: nothing here ends a request that is not ours, but a pause whose mode is to abort.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from fa_rollout.client.address import engine_url
from fa_rollout.client.decode import decode_reply
from fa_rollout.client.engine import Engine, HttpFailure
from fa_rollout.client.errors import ControlFailed, ControlRefused, EngineUnavailable, InvalidReply
from fa_rollout.client.policy import FailurePolicy
from fa_rollout.client.request import WireIds, generate_body

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_PAUSE_PROBE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a probe found."""

    url: str
    version_label: str | None
    has_spans: bool
    """The engine tells which tokens were sampled by which version."""
    model_path: str | None
    server_version: str | None
    vocab_size: int | None


class Fleet:
    """The engines behind a pool."""

    def __init__(
        self,
        urls: list[str],
        *,
        router: bool,
        session: aiohttp.ClientSession,
        policy: FailurePolicy,
        ids: WireIds,
    ) -> None:
        self._session = session
        self._policy = policy
        self._ids = ids
        self.fronts = {url: Engine(url, session, policy) for url in urls}
        """Where requests go: the engines, or the router."""
        self._router = next(iter(self.fronts.values())) if router else None
        self.engines = [] if router else list(self.fronts.values())

    async def refresh(self) -> list[Engine]:
        """The engines as they are now; asks the router for its workers.

        Raises:
            ControlFailed: the router does not answer, or lists none.
        """
        if self._router is None:
            return self.engines
        workers = (await self._router.call("GET", "/workers")).get("workers", [])
        urls = [engine_url(worker["url"]) for worker in workers]
        if not urls:
            raise ControlFailed(f"the router {self._router.url} must have workers, found none in /workers")
        known = {engine.url: engine for engine in self.engines}
        self.engines = [known.get(url) or Engine(url, self._session, self._policy) for url in urls]
        return self.engines

    async def probe_all(self) -> tuple[EngineInfo, ...]:
        """Every engine, once it is up.

        Raises:
            EngineUnavailable: one is not up by the deadline; names each such engine and its last error.
        """
        deadline = time.monotonic() + self._policy.start_timeout_s
        if self._router is not None:
            await _patiently(self.refresh, deadline, self._router.url)
        outcomes = await asyncio.gather(*(self._probe_patiently(e, deadline) for e in self.engines))
        failed = [o for o in outcomes if isinstance(o, str)]
        if failed:
            raise EngineUnavailable("every engine must be up at the start; " + "; ".join(failed))
        return tuple(o for o in outcomes if isinstance(o, EngineInfo))

    async def _probe_patiently(self, engine: Engine, deadline: float) -> EngineInfo | str:
        try:
            return await _patiently(lambda: self.probe(engine), deadline, engine.url)
        except EngineUnavailable as error:
            return str(error)

    async def probe(self, engine: Engine) -> EngineInfo:
        """One engine's version, and the layout of its answers, by a request of one token.

        Raises:
            ControlFailed, InvalidReply: it does not answer as needed.
        """
        model = await self._model_info(engine)
        server = await _optional(engine, "/server_info", "/get_server_info")
        body = generate_body(
            self._ids.make("probe"), [1], {"max_new_tokens": 1, "ignore_eos": True}, stream=False, options={}
        )
        try:
            async with asyncio.timeout(self._policy.control_timeout_s):
                reply = decode_reply(await engine.generate(body, None, None), engine=engine.url)
        except HttpFailure as error:
            raise ControlFailed(
                f"a request of one token must be answered by {engine.url}: {error}"
            ) from error
        except TimeoutError as error:
            raise ControlFailed(
                f"a request of one token must be answered by {engine.url}, found silence"
            ) from error
        if len(reply.output_ids) != 1:
            raise InvalidReply(
                f"a request of one token must give one, found {len(reply.output_ids)} ({engine.url})"
            )
        path = model.get("model_path")
        return EngineInfo(
            url=engine.url,
            version_label=_text(model.get("weight_version")),
            has_spans=reply.has_spans,
            model_path=_text(path),
            server_version=_text(server.get("version")),
            vocab_size=_vocab_size(path),
        )

    async def versions(self) -> dict[str, str | None]:
        """The version label of each engine."""
        return await self._each(self.version_of)

    async def version_of(self, engine: Engine) -> str | None:
        """The version label of one engine."""
        return _text((await self._model_info(engine)).get("weight_version"))

    async def is_paused(self, front: str) -> bool:
        """Whether the engine (any worker, behind a router) says, or lets see, that somebody paused it.

        SGLang has no flag for it: /ready is 503 while paused, where it exists; before that, /health is silent
        while control calls are answered.
        """
        engines = [self.fronts[front]] if self._router is None else self.engines
        return any(await asyncio.gather(*(_looks_paused(engine) for engine in engines)))

    async def pause(self, mode: str) -> None:
        """Engines stand still when this returns. On a failure those that were paused go on again."""
        try:
            await self._each(
                lambda e: e.call(
                    "POST", "/pause_generation", {"mode": mode}, timeout_s=self._policy.pause_timeout_s
                )
            )
        except ControlFailed:
            await self.continue_(tolerant=True)
            raise

    async def continue_(self, *, tolerant: bool = False) -> None:
        """Engines go on; harmless when they run."""
        try:
            await self._each(lambda e: _persistently(lambda: e.call("POST", "/continue_generation", {})))
        except ControlFailed as error:
            if not tolerant:
                raise
            _LOG.warning("event=continue_failed error=%s", error)

    async def update_from_disk(self, path: str, label: str, *, flush_cache: bool) -> None:
        """Load weights on every engine, and see that each tells the new label."""
        await self._each(lambda e: self.update_one(e, path, label, flush_cache=flush_cache))

    async def update_one(self, engine: Engine, path: str, label: str, *, flush_cache: bool) -> None:
        """Load weights on one engine."""
        payload = {
            "model_path": path,
            "weight_version": label,
            "flush_cache": flush_cache,
            "abort_all_requests": False,
        }
        limit_s = self._policy.update_timeout_s
        try:
            answer = await engine.call("POST", "/update_weights_from_disk", payload, timeout_s=limit_s)
        except ControlRefused as error:
            if "must run between" not in str(error):
                raise
            answer = await _bracketed_update(engine, payload, limit_s)
        if answer.get("success") is False:
            raise ControlFailed(f"{engine.url} must load {path}, found: {answer.get('message')}")
        if await self.version_of(engine) != label:
            await self._set_label(engine, label)

    async def set_label(self, label: str) -> None:
        """Every engine tells this label from now on; those that do already are left alone."""
        await self._each(lambda e: self._set_label(e, label))

    async def _set_label(self, engine: Engine, label: str) -> None:
        if await self.version_of(engine) == label:
            return
        # abort_all_requests is true by default, and would end everybody's requests.
        payload = {"new_version": label, "abort_all_requests": False}
        await engine.call("POST", "/update_weight_version", payload)
        found = await self.version_of(engine)
        if found != label:
            raise ControlFailed(f"{engine.url} must tell weight version {label!r}, found {found!r}")

    async def abort(self, wire_id: str, front: str) -> int:
        """Abort one request of ours at the engines that may hold it; how many were not reached."""
        try:
            targets = [self.fronts[front]] if self._router is None else await self.refresh()
        except ControlFailed:
            targets = self.engines
        results = await asyncio.gather(*(_try_abort(engine, wire_id) for engine in targets))
        return results.count(False) if targets else 1

    async def router_has_healthy_workers(self) -> bool:
        """True without a router; else whether it would pass a request on."""
        if self._router is None:
            return True
        try:
            workers = (await self._router.call("GET", "/workers")).get("workers", [])
        except ControlFailed:
            return False
        return any(worker.get("is_healthy", True) for worker in workers)

    async def _model_info(self, engine: Engine) -> dict[str, Any]:
        try:
            return await engine.call("GET", "/model_info")
        except ControlRefused as error:
            if error.status != 404:
                raise
            return await engine.call("GET", "/get_model_info")

    async def _each(self, work: Callable[[Engine], Awaitable[T]]) -> dict[str, T]:
        engines = await self.refresh()
        outcomes = await asyncio.gather(*(work(engine) for engine in engines), return_exceptions=True)
        failures = [o for o in outcomes if isinstance(o, BaseException)]
        for failure in failures:
            if not isinstance(failure, ControlFailed):
                raise failure
        if failures:
            raise ControlFailed("; ".join(str(f) for f in failures))
        return {e.url: o for e, o in zip(engines, outcomes, strict=True) if not isinstance(o, BaseException)}


async def _looks_paused(engine: Engine) -> bool:
    if await engine.status("/model_info", _PAUSE_PROBE_S) is None:
        return False
    ready = await engine.status("/ready", _PAUSE_PROBE_S)
    if ready not in (None, 404):
        return ready == 503
    return await engine.status("/health", _PAUSE_PROBE_S) in (None, 503)


async def _try_abort(engine: Engine, wire_id: str) -> bool:
    try:
        await engine.call("POST", "/abort_request", {"rid": wire_id})
    except ControlFailed as error:
        _LOG.warning("event=abort_not_delivered rid=%s error=%s", wire_id, error)
        return False
    return True


async def _bracketed_update(engine: Engine, payload: dict[str, Any], limit_s: float) -> dict[str, Any]:
    await engine.call("POST", "/begin_weight_update", {}, timeout_s=limit_s)
    try:
        return await engine.call("POST", "/update_weights_from_disk", payload, timeout_s=limit_s)
    finally:
        await engine.call("POST", "/end_weight_update", {}, timeout_s=limit_s)


async def _optional(engine: Engine, *paths: str) -> dict[str, Any]:
    for path in paths:
        try:
            return await engine.call("GET", path)
        except ControlRefused:
            continue
    return {}


async def _patiently(work: Callable[[], Awaitable[T]], deadline: float, url: str) -> T:
    """Try again until the deadline: an engine may still be loading its model."""
    while True:
        try:
            return await work()
        except (ControlFailed, InvalidReply) as error:
            if time.monotonic() + 0.5 > deadline or isinstance(error, InvalidReply):
                raise EngineUnavailable(f"{url}: {error}") from error
        await asyncio.sleep(0.5)


async def _persistently(work: Callable[[], Awaitable[T]], attempts: int = 3) -> T:
    for _ in range(attempts - 1):
        try:
            return await work()
        except ControlRefused:
            raise
        except ControlFailed:
            await asyncio.sleep(0.2)
    return await work()


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _vocab_size(model_path: Any) -> int | None:
    """From the model's own folder, where this machine can see it."""
    try:
        config = json.loads((Path(str(model_path)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) else None
