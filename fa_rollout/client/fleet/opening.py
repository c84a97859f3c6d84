"""The start of a pool: which engines are up, and what they are.

| who waits | for | at most |
|---|---|---|
| a first start | every engine | `start_timeout_s` |
| one that takes over from another life | one engine, then `_LATE_S` for the others | `start_timeout_s` |
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from fa_rollout.client.base.errors import EngineUnavailable
from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.client.engine import control
from fa_rollout.client.engine.endpoints import Engine
from fa_rollout.client.engine.probe import patiently, probe, recognised
from fa_rollout.client.engine.standing import EngineInfo
from fa_rollout.client.fleet.fleet import Fleet
from fa_rollout.client.wire.request import WireIds

_LOG = logging.getLogger(__name__)
_LATE_S = 0.5

_Outcome = EngineInfo | EngineUnavailable | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a pool starts."""

    fleet: Fleet
    policy: FailurePolicy
    ids: WireIds
    ends_pauses: bool
    """An engine that stands paused for long goes on."""
    takes_over: bool
    """An earlier life of the caller may have left engines paused: they go on, if `ends_pauses`; one that is
    away is not waited for."""
    known: Mapping[str, EngineInfo]
    """What an earlier life found, by address: such an engine is asked for its version alone."""

    async def probe_all(self) -> list[Engine]:
        """Note what the engines that are up are; return those that were not waited for.

        Raises:
            EngineUnavailable: one that is waited for is not up in time; names each and its last error.
        """
        deadline = time.monotonic() + self.policy.start_timeout_s
        engines = await self.fleet.await_engines(deadline)
        outcomes = await self._all([self._one(engine, deadline) for engine in engines])
        failed = [outcome for outcome in outcomes if isinstance(outcome, EngineUnavailable)]
        found = [outcome for outcome in outcomes if isinstance(outcome, EngineInfo)]
        if failed and not (self.takes_over and found):
            raise EngineUnavailable("not all engines are up; " + "; ".join(map(str, failed)))
        by_url = {info.url: info for info in found}
        for engine in engines:
            engine.standing.info = by_url.get(engine.url)
        return [engine for engine in engines if engine.standing.info is None]

    async def _one(self, engine: Engine, deadline: float) -> _Outcome:
        limit_s = min(self.policy.control_timeout_s, self.policy.start_timeout_s)
        try:
            if self.takes_over and self.ends_pauses:
                engine.standing.is_paused = True
                await patiently(lambda: control.continue_(engine), deadline, engine.url)
            known = self.known.get(engine.url)
            if known is not None:
                found = await patiently(lambda: recognised(engine, known), deadline, engine.url)
                if found is not None:
                    return found
            return await patiently(
                lambda: probe(engine, self.ids.make("probe"), limit_s, ends_pauses=self.ends_pauses),
                deadline,
                engine.url,
            )
        except EngineUnavailable as error:
            return error

    async def _all(self, works: list[Coroutine[Any, Any, _Outcome]]) -> list[_Outcome]:
        """What each brings; None for one that is late, whose work is cancelled."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
            if self.takes_over:
                pending = set(tasks)
                while pending and not any(_is_up(task) for task in tasks):
                    _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                _, late = await asyncio.wait(tasks, timeout=_LATE_S)
                for task in late:
                    task.cancel()
        return [None if task.cancelled() else task.result() for task in tasks]


def _is_up(task: "asyncio.Task[_Outcome]") -> bool:
    return task.done() and isinstance(task.result(), EngineInfo)
