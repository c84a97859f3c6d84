"""Control calls to every engine of a pool at once. Behind a router the engines are its workers.

Invariants: an engine that cannot be reached is taken out, and brought back only with the current weights; it
does not keep the others from going on. One that refuses is an error. Engines are known by their addresses:
one that we have paused is continued there, whatever a router says of it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from functools import partial
from typing import TypeVar

import aiohttp

from fa_rollout.client.base.errors import ControlFailed, ControlRefused
from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.client.engine import control, loading
from fa_rollout.client.engine.endpoints import Engine
from fa_rollout.client.engine.probe import patiently
from fa_rollout.client.engine.standing import EngineInfo, Status
from fa_rollout.client.fleet.router import Router

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_WORKERS_AGE_S = 1.0
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
        self.router = Router(Engine(urls[0], session, policy)) if router else None
        """In front of all engines, which are those that it lists."""
        self._listed_at = -_WORKERS_AGE_S
        self._abort_slots = asyncio.Semaphore(_MAX_ABORTS_AT_ONCE)
        self._known: dict[str, Engine] = {}
        """Every engine by its address, with what we have asked of it, whether it is in or not."""
        if not router:
            self._set_members(urls)
        self.on_lost: Callable[[Engine, ControlFailed], None] = lambda engine, error: None

    @property
    def engines(self) -> list[Engine]:
        """Engines that are in: those of the pool, or those that the router listed last."""
        return [engine for engine in self._known.values() if engine.standing.is_member]

    def _set_members(self, urls: Collection[str]) -> None:
        for url in urls:
            self.known(url)
        for engine in self._known.values():
            engine.standing.is_member = engine.url in urls

    @property
    def infos(self) -> list[EngineInfo]:
        """What the probes found, of engines that are up or were."""
        return [one.standing.info for one in self._known.values() if one.standing.info is not None]

    def front(self, url: str) -> Engine:
        """Where requests of a lane go: an engine, or the router."""
        return self._known[url] if self.router is None else self.router.front

    async def refresh(self) -> list[Engine]:
        """The engines as they are now; a router is asked for its workers.

        A router that is away, or lists none, as it may while its workers are paused, leaves those of before.

        Raises:
            ControlFailed: it has never listed any.
        """
        if self.router is None or time.monotonic() < self._listed_at + _WORKERS_AGE_S:
            return self.engines
        try:
            urls = await self.router.urls()
        except ControlFailed as error:
            if not self.engines:
                raise
            _LOG.warning("event=workers_unknown error=%s", error)
            return self.engines
        self._set_members(urls)
        self._listed_at = time.monotonic()
        return self.engines

    def known(self, url: str) -> Engine:
        """The engine at an address, with what we have asked of it so far."""
        if url not in self._known:
            self._known[url] = Engine(url, self._session, self._policy)
        return self._known[url]

    @property
    def members(self) -> list[Engine]:
        """Engines that are in, also those that we took off a router's list."""
        standings = ((engine, engine.standing) for engine in self._known.values())
        return [engine for engine, one in standings if one.is_member or one.is_struck_off]

    @property
    def serving(self) -> list[Engine]:
        """Engines that are in and not out."""
        return [engine for engine in self.engines if not engine.standing.is_out]

    async def await_engines(self, deadline: float) -> list[Engine]:
        """The engines at the start, for which a router is waited for until the deadline (time.monotonic()).

        Raises:
            EngineUnavailable: it does not answer, or has none.
        """
        if self.router is not None:
            await patiently(self.refresh, deadline, self.router.url)
        return list(self.engines)

    async def versions(self) -> dict[str, str | None]:
        """The version label of each engine that can be reached."""
        return await self._each(control.version_of)

    async def pause(self, mode: str) -> None:
        """Engines are paused when this returns. When one refuses, those that were paused continue.

        Raises:
            ControlFailed: one refused, or none was reached.
        """
        try:
            await self._each(lambda engine: control.pause(engine, mode))
        except ControlFailed:
            with suppress(ControlFailed):
                await self.continue_()
            raise

    async def continue_(self, *, also_lost: bool = False) -> None:
        """Every engine that we have paused continues; one that does not accept it soon is lost until it does.

        Args:
            also_lost: ask engines that are lost, too; else that is for those who bring them back.

        Raises:
            ControlFailed: of those that did not accept it.
        """
        owed = [engine for engine in self._known.values() if engine.standing.is_paused]
        paused = [engine for engine in owed if also_lost or not engine.standing.is_out]
        limit_s = min(self._policy.control_try_s, self._policy.control_timeout_s)
        work = partial(control.continue_, limit_s=limit_s)
        outcomes = await asyncio.gather(*map(partial(_outcome, work), paused))
        failed = {e: o for e, o in zip(paused, outcomes, strict=True) if isinstance(o, ControlFailed)}
        for engine, error in failed.items():
            self.on_lost(engine, error)
        if failed:
            raise ControlFailed("; ".join(map(str, failed.values())))

    async def flush_cache(self) -> None:
        """Every engine forgets what it computed under its present weights."""
        await self._each(control.flush_cache)

    async def load_weights(self, files: loading.Files, *, flush_cache: bool) -> None:
        """Every engine loads weights from a folder and tells their label."""
        limit_s = self._policy.update_timeout_s
        await self._each(
            lambda engine: loading.load_weights(engine, files, flush_cache=flush_cache, limit_s=limit_s)
        )

    async def returning(self) -> list[Engine]:
        """Engines that are lost and answer again.

        Raises:
            ControlFailed: the router does not answer, or lists none.
        """
        lost = [engine for engine in await self.everyone() if engine.standing.is_out]
        answers = await asyncio.gather(*(engine.status("/model_info", _LOOK_S) for engine in lost))
        return [engine for engine, status in zip(lost, answers, strict=True) if status is not None]

    async def everyone(self) -> list[Engine]:
        """All engines, also those that are out, that join, or that a router does not list because of us.

        Raises:
            ControlFailed: a router has never listed any.
        """
        unlisted = [engine for engine in self._known.values() if _is_ours_to_mind(engine)]
        listed = await self._listed() if unlisted else await self.refresh()
        return list({engine.url: engine for engine in [*listed, *unlisted]}.values())

    def unread(self) -> list[Engine]:
        """Engines that hold what they were given, as far as they tell, and could not tell."""
        return [engine for engine in self._known.values() if engine.standing.is_unread]

    async def set_label(self, label: str) -> None:
        """Every engine tells this label from now on."""
        await self._each(lambda engine: control.set_label(engine, label))

    def admit(self, engine: Engine) -> None:
        """Requests may go to it from now on; without a router."""
        engine.standing.is_member = True

    def forget(self, url: str) -> None:
        """An engine without requests of ours has left."""
        self._known.pop(url, None)

    async def enlist(self, engine: Engine) -> None:
        """The router passes requests on to it when this returns.

        Raises:
            ControlFailed: it does not.
        """
        assert self.router is not None, "only a router has a list"
        was, engine.standing.status = engine.standing.status, Status.JOINS
        try:
            await self.router.add(engine.url)
            until = time.monotonic() + self._policy.start_timeout_s
            while engine.url not in {one.url for one in await self._listed()}:
                if time.monotonic() > until:
                    limit_s = self._policy.start_timeout_s
                    text = f"the router {self.router.url} must list {engine.url} within {limit_s:g} s"
                    raise ControlFailed(text)
                await asyncio.sleep(_LISTED_POLL_S)
        except BaseException:
            engine.standing.status = was
            raise
        engine.standing.status = Status.SERVES

    async def set_aside(self, engine: Engine) -> None:
        """The router sends it nothing until `reenlist`; without a router that is its lane's to see to."""
        if self.router is None or engine.standing.is_struck_off:
            return
        engine.standing.is_struck_off = True
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
            engine.standing.is_struck_off = False

    async def hand_back(self) -> None:
        """Whoever uses the router next finds the workers that were set aside on its list."""
        for engine in [one for one in self._known.values() if one.standing.is_struck_off]:
            assert self.router is not None, "only a router has a list"
            try:
                await self.router.add(engine.url)
            except ControlFailed as error:
                _LOG.warning("event=worker_not_listed endpoint=%s error=%s", engine.url, error)

    async def strike_off(self, url: str) -> None:
        """The router begins no request there any more; harmless when it never did.

        Raises:
            ControlFailed: it does not answer.
        """
        assert self.router is not None, "only a router has a list"
        await self.router.remove(url)
        self.known(url).standing.is_member = False
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
        if self.router is None and front not in self._known:
            return 0  # it has left, and all that it had is over
        try:
            targets = [self._known[front]] if self.router is None else await self.refresh()
        except ControlFailed as error:
            _LOG.warning("event=workers_unknown error=%s", error)
            targets = self.engines
        async with self._abort_slots:
            results = await asyncio.gather(*(control.abort(engine, wire_id) for engine in targets))
        return results.count(False)

    async def is_paused(self, front: str) -> bool:
        """Whether somebody else has paused an engine behind this front; asked twice a second at most."""
        if self.router is None and front not in self._known:
            return False
        engines = [self._known[front]] if self.router is None else self.engines
        return any(await asyncio.gather(*map(control.is_paused_by_others, engines)))

    def _losses(self) -> str:
        return "; ".join(f"{engine.url}: {engine.standing.last_error}" for engine in self.members)

    def is_router(self, engine: Engine) -> bool:
        """True for the router itself."""
        return self.router is not None and engine is self.router.front

    async def has_healthy_workers(self) -> bool:
        """True without a router; else whether it would pass a request on."""
        return self.router is None or await self.router.has_healthy_workers()

    async def _each(self, work: Callable[[Engine], Awaitable[T]]) -> dict[str, T]:
        """Do it on every engine that is not lost, all at once; wait for all."""
        engines = [engine for engine in await self.everyone() if not engine.standing.is_out]
        outcomes = await asyncio.gather(*map(partial(_outcome, work), engines))
        done = {e.url: o for e, o in zip(engines, outcomes, strict=True) if not isinstance(o, ControlFailed)}
        failed = {e: o for e, o in zip(engines, outcomes, strict=True) if isinstance(o, ControlFailed)}
        refusals = [o for o in failed.values() if isinstance(o, ControlRefused)]
        if refusals:
            raise ControlRefused("; ".join(map(str, refusals)))
        if not done:
            causes = "; ".join(map(str, failed.values()))
            raise ControlFailed(causes or f"all engines are lost: {self._losses()}")
        for engine, error in failed.items():
            self.on_lost(engine, error)
        return done


async def _outcome(work: Callable[[Engine], Awaitable[T]], engine: Engine) -> T | ControlFailed:
    try:
        return await work(engine)
    except ControlFailed as error:
        return error


def _is_ours_to_mind(engine: Engine) -> bool:
    """Whether no update may miss it, or we have paused it, be it on a router's list or not."""
    standing = engine.standing
    return standing.is_struck_off or standing.is_paused or standing.status is Status.JOINS
