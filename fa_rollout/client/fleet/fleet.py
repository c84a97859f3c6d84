"""Control calls to every engine of a pool at once. Behind a router the engines are its workers.

Invariant: an engine that cannot be reached is taken out, and brought back only with the current weights; it
does not keep the others from going on. One that refuses is an error.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import aiohttp
import msgspec

from fa_rollout.client.base.errors import ControlFailed, ControlRefused
from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.client.engine import control
from fa_rollout.client.engine.endpoints import Engine
from fa_rollout.client.engine.probe import patiently
from fa_rollout.client.wire.address import AddressError, engine_url

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_WORKERS_AGE_S = 1.0
_PAUSE_AGE_S = 0.5
_LISTED_POLL_S = 0.2
_LOOK_S = 3.0
_MAX_ABORTS_AT_ONCE = 32
"""Each takes a socket of its own, since those of requests are in use."""


class Fleet:
    """The engines behind a pool."""

    def __init__(
        self, urls: list[str], *, router: bool, session: aiohttp.ClientSession, policy: FailurePolicy
    ) -> None:
        self._session = session
        self._policy = policy
        self.fronts = {url: Engine(url, session, policy) for url in urls}
        """Where requests go: the engines, or the router."""
        self._router = next(iter(self.fronts.values())) if router else None
        self.engines = [] if router else list(self.fronts.values())
        self._listed_at = -_WORKERS_AGE_S
        self._abort_slots = asyncio.Semaphore(_MAX_ABORTS_AT_ONCE)
        self._pause_locks = {url: asyncio.Lock() for url in self.fronts}
        self._pauses_seen: dict[str, tuple[float, bool]] = {}
        self.lost: set[str] = set()
        """Engines that are out until somebody has brought them back."""
        self.on_lost: Callable[[Engine, ControlFailed], None] = lambda engine, error: None
        self.newcomers: dict[str, Engine] = {}
        """Engines with the current weights that the router does not list yet: no update may miss them."""
        self.aside: dict[str, Engine] = {}
        """Engines that were struck off the router's list until they have the current weights."""

    async def refresh(self) -> list[Engine]:
        """The engines as they are now; a router is asked for its workers.

        Raises:
            ControlFailed: the router does not answer, or lists none.
        """
        if self._router is None or time.monotonic() < self._listed_at + _WORKERS_AGE_S:
            return self.engines
        urls = [worker.url for worker in await _workers(self._router)]
        if not urls:
            raise ControlFailed(f"the router {self._router.url} must have workers, found none")
        known = {engine.url: engine for engine in self.engines}
        self.engines = [known.get(url) or Engine(url, self._session, self._policy) for url in urls]
        self._listed_at = time.monotonic()
        return self.engines

    async def await_engines(self, deadline: float) -> list[Engine]:
        """The engines at the start, for which a router is waited for until the deadline (time.monotonic()).

        Raises:
            EngineUnavailable: it does not answer, or has none.
        """
        if self._router is not None:
            await patiently(self.refresh, deadline, self._router.url)
        return list(self.engines)

    async def versions(self) -> dict[str, str | None]:
        """The version label of each engine that can be reached."""
        return await self._each(control.version_of)

    async def pause(self, mode: str) -> None:
        """Engines stand still when this returns. When one refuses, those that were paused go on again."""
        limit_s = self._policy.pause_timeout_s
        try:
            await self._each(
                lambda engine: engine.call("POST", "/pause_generation", {"mode": mode}, timeout_s=limit_s)
            )
        except ControlFailed:
            await self.continue_(tolerant=True)
            raise

    async def continue_(self, *, tolerant: bool = False) -> None:
        """Engines go on; harmless when they run."""
        try:
            await self._each(lambda engine: _twice(lambda: engine.call("POST", "/continue_generation", {})))
        except ControlFailed as error:
            if not tolerant:
                raise
            _LOG.warning("event=continue_failed error=%s", error)

    async def flush_cache(self) -> None:
        """Every engine forgets what it computed under its present weights."""
        await self._each(control.flush_cache)

    async def load_weights(
        self, files: control.Files, *, flush_cache: bool, takes_parts: Callable[[str], bool]
    ) -> None:
        """Every engine loads weights from a folder and tells their label."""
        limit_s = self._policy.update_timeout_s
        await self._each(
            lambda engine: control.load_weights(
                engine, files, takes_parts=takes_parts(engine.url), flush_cache=flush_cache, limit_s=limit_s
            )
        )

    async def returning(self) -> list[Engine]:
        """Engines that are lost and answer again.

        Raises:
            ControlFailed: the router does not answer, or lists none.
        """
        lost = [engine for engine in await self.everyone() if engine.url in self.lost]
        answers = await asyncio.gather(*(engine.status("/model_info", _LOOK_S) for engine in lost))
        return [engine for engine, status in zip(lost, answers, strict=True) if status is not None]

    async def everyone(self) -> list[Engine]:
        """All engines, also those that are lost, and newcomers.

        Raises:
            ControlFailed: the router does not answer, or lists none.
        """
        has_others = self.newcomers or self.aside
        listed = await self._listed() if has_others else await self.refresh()
        others = [*self.newcomers.values(), *self.aside.values()]
        return list({engine.url: engine for engine in [*listed, *others]}.values())

    async def set_label(self, label: str) -> None:
        """Every engine tells this label from now on."""
        await self._each(lambda engine: control.set_label(engine, label))

    def made(self, url: str) -> Engine:
        """The endpoints of an engine that is none of these yet."""
        return Engine(url, self._session, self._policy)

    def admit(self, engine: Engine) -> None:
        """Requests may go to it from now on; without a router."""
        self.fronts[engine.url] = engine
        self.engines.append(engine)
        self._pause_locks[engine.url] = asyncio.Lock()

    def forget(self, url: str) -> None:
        """An engine without requests of ours has left; without a router."""
        engine = self.fronts.pop(url)
        self.engines.remove(engine)
        del self._pause_locks[url]

    async def enlist(self, engine: Engine) -> None:
        """The router passes requests on to it when this returns.

        Raises:
            ControlFailed: it does not.
        """
        assert self._router is not None, "only a router has a list"
        self.newcomers[engine.url] = engine
        try:
            await self._router.call("POST", "/workers", {"url": engine.url})
            until = time.monotonic() + self._policy.start_timeout_s
            while engine.url not in {one.url for one in await self._listed()}:
                if time.monotonic() > until:
                    limit_s = self._policy.start_timeout_s
                    text = f"the router {self._router.url} must list {engine.url} within {limit_s:g} s"
                    raise ControlFailed(text)
                await asyncio.sleep(_LISTED_POLL_S)
        finally:
            self.newcomers.pop(engine.url, None)

    async def set_aside(self, engine: Engine) -> None:
        """The router sends it nothing until `reenlist`; without a router that is its lane's to see to."""
        if self._router is None or engine.url in self.aside:
            return
        self.aside[engine.url] = engine
        try:
            await self.strike_off(engine.url)
        except ControlFailed as error:
            _LOG.warning("event=worker_not_struck_off endpoint=%s error=%s", engine.url, error)

    async def reenlist(self, engine: Engine) -> None:
        """It has the current weights again."""
        try:
            await self.enlist(engine)
        except ControlFailed as error:
            _LOG.warning("event=worker_not_listed endpoint=%s error=%s", engine.url, error)
        else:
            self.aside.pop(engine.url, None)

    async def hand_back(self) -> None:
        """Whoever uses the router next finds the workers that were set aside on its list."""
        for engine in self.aside.values():
            assert self._router is not None, "only a router has a list"
            try:
                await self._router.call("POST", "/workers", {"url": engine.url})
            except ControlFailed as error:
                _LOG.warning("event=worker_not_listed endpoint=%s error=%s", engine.url, error)

    async def strike_off(self, url: str) -> None:
        """The router begins no request there any more; harmless when it never did.

        Raises:
            ControlFailed: it does not answer.
        """
        assert self._router is not None, "only a router has a list"
        for worker in await _workers(self._router):
            if worker.url == url:
                await self._router.call("DELETE", f"/workers/{worker.id}")
        self.engines = [engine for engine in self.engines if engine.url != url]
        self._listed_at = -_WORKERS_AGE_S

    async def _listed(self) -> list[Engine]:
        """A router's workers now, also when it has none."""
        self._listed_at = -_WORKERS_AGE_S
        try:
            return await self.refresh()
        except ControlFailed:
            return []

    async def abort(self, wire_id: str, front: str) -> int:
        """Abort one request of ours at the engines that may hold it; how many were not reached."""
        if front not in self.fronts:
            return 0  # it has left, and all that it had is over
        try:
            targets = [self.fronts[front]] if self._router is None else await self.refresh()
        except ControlFailed as error:
            _LOG.warning("event=workers_unknown error=%s", error)
            targets = self.engines
        async with self._abort_slots:
            results = await asyncio.gather(*(control.abort(engine, wire_id) for engine in targets))
        return results.count(False)

    async def is_paused(self, front: str) -> bool:
        """Whether somebody has paused an engine behind this front; asked twice a second at most."""
        if front not in self.fronts:
            return False
        async with self._pause_locks[front]:
            seen_at, was_paused = self._pauses_seen.get(front, (-_PAUSE_AGE_S, False))
            if time.monotonic() < seen_at + _PAUSE_AGE_S:
                return was_paused
            engines = [self.fronts[front]] if self._router is None else self.engines
            found = any(await asyncio.gather(*(control.looks_paused(engine) for engine in engines)))
            self._pauses_seen[front] = (time.monotonic(), found)
            return found

    def is_router(self, engine: Engine) -> bool:
        """True for the router itself."""
        return engine is self._router

    async def has_healthy_workers(self) -> bool:
        """True without a router; else whether it would pass a request on."""
        if self._router is None:
            return True
        try:
            return any(worker.is_healthy for worker in await _workers(self._router))
        except ControlFailed:
            return False

    async def await_router(self) -> None:
        """A router answers 503 until its next health check has seen that a worker runs again."""
        until = time.monotonic() + self._policy.control_timeout_s
        while time.monotonic() < until:
            if await self.has_healthy_workers():
                return
            await asyncio.sleep(0.2)

    async def _each(self, work: Callable[[Engine], Awaitable[T]]) -> dict[str, T]:
        """Do it on every engine that is not lost, all at once; wait for all."""
        engines = [engine for engine in await self.everyone() if engine.url not in self.lost]
        outcomes = await asyncio.gather(*map(partial(_outcome, work), engines))
        done = {e.url: o for e, o in zip(engines, outcomes, strict=True) if not isinstance(o, ControlFailed)}
        failed = {e: o for e, o in zip(engines, outcomes, strict=True) if isinstance(o, ControlFailed)}
        refusals = [o for o in failed.values() if isinstance(o, ControlRefused)]
        if refusals:
            raise ControlRefused("; ".join(map(str, refusals)))
        if not done:
            causes = "; ".join(map(str, failed.values()))
            raise ControlFailed(causes or "an engine must be left, found all of them lost")
        for engine, error in failed.items():
            self.on_lost(engine, error)
        return done


class _Worker(msgspec.Struct):
    """An entry of a router's list."""

    url: str
    id: str = ""
    is_healthy: bool = True


async def _workers(router: Engine) -> list[_Worker]:
    """A router's list.

    Raises:
        ControlFailed: it does not answer, or with no list of addresses.
    """
    answer = await router.call("GET", "/workers")
    try:
        workers = msgspec.convert(answer.get("workers"), list[_Worker])
        return [msgspec.structs.replace(worker, url=engine_url(worker.url)) for worker in workers]
    except (msgspec.ValidationError, AddressError) as error:
        raise ControlFailed(f"{router.url}/workers must list urls, found {answer}: {error}") from error


async def _outcome(work: Callable[[Engine], Awaitable[T]], engine: Engine) -> T | ControlFailed:
    try:
        return await work(engine)
    except ControlFailed as error:
        return error


async def _twice(work: Callable[[], Awaitable[Any]]) -> Any:
    """Once more after a lost connection: a keep-alive socket may have died in the pause."""
    try:
        return await work()
    except ControlRefused:
        raise
    except ControlFailed:
        return await work()
