"""Weights to the engines piece by piece, while they stand still: in requests, or by broadcasts of a group.

In: stages, one after the other, and their end by `confirm` or `abandon`. Out: engines that hold the new
weights and tell their label; those that missed a part are taken out.

Invariants: from `open` to `seal` an engine tells a label that is no version, so that whatever happens to it,
or to us, it is never taken for one that is whole; before 0.5.21 SGLang knows no brackets around updates, from
then on it wants them. No request is ended.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from fa_rollout.client.base.errors import ControlFailed, ControlRefused
from fa_rollout.client.base.policy import FailurePolicy
from fa_rollout.client.engine import control, loading, readback
from fa_rollout.client.engine.endpoints import Engine
from fa_rollout.client.engine.labels import IN_PIECES
from fa_rollout.client.engine.tensor_body import TensorBody, TensorFile
from fa_rollout.client.fleet.fleet import Fleet
from fa_rollout.client.fleet.recovery import Recovery
from fa_rollout.client.fleet.weights import Weights
from trainer_hook.messages import GROUP_TIMEOUT_S, Audience, JoinGroup, Probe, TakeBroadcast

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_GRACE_S = 30.0
"""Beyond the deadline of a group, for an engine to tell of it."""


class EnginesLost(ControlFailed):
    """Engines were lost in the middle of a stream: it may be tried again with the others."""


class WeightStream:
    """The stream that is open, if one is; and the group that lives from one to the next."""

    def __init__(self, fleet: Fleet, recovery: Recovery, policy: FailurePolicy) -> None:
        self._fleet = fleet
        self._recovery = recovery
        self._policy = policy
        self._members: list[Engine] | None = None
        """Engines that have taken every part so far; None when no stream is open."""
        self._label: str | None = None
        """Told by every engine that took all of the last stream."""
        self._group: tuple[str, frozenset[str]] | None = None
        """Name and members of the group that was joined last."""

    @property
    def is_open(self) -> bool:
        """Some engine may hold a part of new weights."""
        return self._members is not None

    async def open(self, mode: str, *, base: str | None = None) -> Audience:
        """Begin with every engine that can be reached, also those that missed an earlier update.

        `mode`: in which they are paused. `base`: only some weights will come, for engines that hold the
        version of this label; others wait for all weights.

        Raises:
            EnginesLost: none can be reached.
            ControlRefused: an engine cannot empty its cache; nothing was changed.
        """
        was_open = self.is_open
        everyone = await self._fleet.everyone()
        self._members = [engine for engine in everyone if not engine.standing.is_out]
        if base is not None:
            await self._each(lambda engine: _check_holds(engine, base), may_be_none=True)
            if not self._members:
                self._members = None
                raise ControlRefused(f"no engine holds the weights labelled {base!r}: push all weights")
        try:
            await self._each(lambda engine: loading.make_ready(engine, mode), may_be_none=True)
        except ControlRefused:
            self._members = self._members if was_open else None
            raise
        await self._each(self._begin, may_be_none=True)
        if base is None:
            self._members += await self._returning(mode)
        if not self._members:
            raise EnginesLost("no engine is left to stream weights to: all are lost")
        urls = [engine.url for engine in self._members]
        is_same = self._group is not None and self._group[1] == frozenset(urls)
        return Audience(
            urls=urls,
            num_workers=sum(map(_num_workers, self._members)),
            group=self._group[0] if is_same and self._group is not None else None,
        )

    async def join_group(self, stage: JoinGroup) -> None:
        """Every worker of every engine joins a group of rank 0, which waits for them.

        Raises:
            EnginesLost, ControlRefused: one did not.
        """
        members = self._open_members()
        self._group = None
        await asyncio.gather(*(self._leave_groups(engine, stage.former) for engine in members))
        offsets, size = {}, 1
        for engine in members:
            offsets[engine.url] = size
            size += _num_workers(engine)
        payload = {
            "master_address": stage.address,
            "master_port": stage.port,
            "world_size": size,
            "group_name": stage.group,
            "backend": stage.backend,
        }
        for engine in members:
            engine.standing.groups.add(stage.group)
        await self._together(
            "/init_weights_update_group", lambda engine: payload | {"rank_offset": offsets[engine.url]}
        )
        self._group = (stage.group, frozenset(offsets))

    async def take_tensors(self, path: str) -> None:
        """Every engine takes a bucket of tensors, a file; one that is lost is left out from then on.

        Raises:
            EnginesLost: all of them.
            ControlRefused: one refused.
            ControlFailed: the file is gone.
        """
        self._open_members()
        async with TensorFile(path) as file:
            await self._each(lambda engine: self._take(engine, file.body(_num_workers(engine))))

    async def take_broadcast(self, stage: TakeBroadcast) -> None:
        """Every engine receives these tensors from rank 0 of the group.

        Raises:
            EnginesLost, ControlRefused: one did not, and so the others may not have either.
        """
        payload = {
            "names": stage.names,
            "dtypes": stage.dtypes,
            "shapes": stage.shapes,
            "group_name": stage.group,
            "flush_cache": False,
            "abort_all_requests": False,
        }
        limit_s = GROUP_TIMEOUT_S * len(stage.names)
        await self._together("/update_weights_from_distributed", lambda _: payload, limit_s=limit_s)

    async def seal(self, label: str, probes: Sequence[Probe] = ()) -> None:
        """All was sent: engines tell the label of what they hold now, if they hold the numbers of `probes`.

        Raises:
            EnginesLost, ControlRefused: it is not told.
        """

        async def finish(engine: Engine) -> None:
            await loading.end_session(engine)
            await readback.check(engine, probes)
            await control.set_label(engine, label, in_place_of=IN_PIECES)

        self._recovery.weights.claim(label)
        await self._each(finish)
        self._label = label

    async def confirm(self, label: str) -> None:
        """The version counts: requests may go to every engine that tells it, and to no other.

        Raises:
            EnginesLost: there is none. An earlier life of ours may have sealed the stream.
        """
        if self._members is None:
            self._members = await self._fleet.everyone()

        async def look(engine: Engine) -> None:
            found = await control.version_of(engine)
            self._recovery.weights.check_ours(engine, found)
            if found != label:
                raise ControlFailed(f"{engine.url} must report weight version {label!r}, found {found!r}")

        await self._each(look)
        members, self._members = self._open_members(), None
        for engine in members:
            engine.standing.label = label
        self._recovery.weights.want(Weights(label=label, is_streamed=True))
        self._recovery.has_weights(members)

    async def abandon(self, label: str) -> None:
        """The stream ends before its end; `label`: of the version that engines must have. Idempotent."""
        members, self._members = self._members, None
        if members is None:
            return
        self._group = None
        if self._recovery.weights.wanted is None:
            self._recovery.weights.want(Weights(label=label, is_streamed=True))
        error = ControlFailed("its weights were replaced in part")
        for engine in members:
            self._recovery.lost(engine, error)
            await self._fleet.set_aside(engine)
        await asyncio.gather(*(self._let_go(engine) for engine in members))

    async def supersede(self) -> None:
        """Whatever a stream has brought, engines have whole weights from elsewhere now."""
        members, self._members = self._members, None
        await asyncio.gather(*(self._end_session(engine) for engine in members or []))

    async def forget_groups(self) -> None:
        """Engines leave every group that they are in because of us."""
        self._group = None
        await asyncio.gather(*(self._leave_groups(engine) for engine in self._fleet.members))

    # --- inside -----------------------------------------------------------------------------------

    async def _take(self, engine: Engine, body: TensorBody) -> None:
        limit_s = self._policy.update_timeout_s
        answer = await control.insist(  # taken twice, they are the same tensors
            engine,
            lambda try_s: engine.call_with(loading.TENSORS, body, timeout_s=try_s),
            limit_s=limit_s,
            try_s=limit_s,
            only_refused=True,
        )
        loading.check_taken(engine, answer)

    async def _returning(self, mode: str) -> list[Engine]:
        """Engines that were lost and can take part. What they cannot is no error: they stay lost."""

        async def prepare(engine: Engine) -> None:
            await loading.make_ready(engine, mode)
            await self._begin(engine)

        outcomes = await self._outcomes(await self._fleet.returning(), prepare)
        return [engine for engine, failure in outcomes if failure is None]

    def _open_members(self) -> list[Engine]:
        if self._members is None:
            raise EnginesLost("this stream of weights was aborted: start a new one")
        return self._members

    async def _begin(self, engine: Engine) -> None:
        found = await control.version_of(engine)
        self._recovery.weights.check_ours(engine, found)
        if found not in (self._label, IN_PIECES):
            self._group = None  # it was started anew since, and a broadcast without a group would end it
        await control.set_label(engine, IN_PIECES)
        await loading.begin_session(engine)

    async def _let_go(self, engine: Engine) -> None:
        """It goes on, for whoever else it serves: none of our requests goes there."""
        await self._end_session(engine)
        try:
            await control.set_label(engine, IN_PIECES)
            await control.continue_(engine)
        except ControlFailed as error:
            _LOG.info("event=not_let_go endpoint=%s error=%s", engine.url, error)

    async def _leave_groups(self, engine: Engine, former: str | None = None) -> None:
        names = engine.standing.groups | ({former} if former is not None else set())
        await asyncio.gather(*(loading.destroy_group(engine, name) for name in names))

    async def _end_session(self, engine: Engine) -> None:
        try:
            await loading.end_session(engine)
        except ControlFailed as error:
            _LOG.info("event=session_left_open endpoint=%s error=%s", engine.url, error)

    async def _together(
        self, path: str, payload: Callable[[Engine], dict[str, Any]], *, limit_s: float = GROUP_TIMEOUT_S
    ) -> None:
        """A call in which the engines wait for one another: one that is lost spoils it for all."""

        async def take(engine: Engine) -> None:
            answer = await engine.call("POST", path, payload(engine), timeout_s=limit_s + _GRACE_S)
            loading.check_taken(engine, answer)

        num_members = len(self._open_members())
        try:
            await self._each(take, tolerates_refusals=True)
        except ControlFailed:
            self._group = None
            raise
        if len(self._open_members()) < num_members:
            self._group = None
            raise EnginesLost(f"engines were lost in {path}")

    async def _each(
        self,
        work: Callable[[Engine], Awaitable[object]],
        *,
        tolerates_refusals: bool = False,
        may_be_none: bool = False,
    ) -> None:
        """Do it on every member; those that are lost are none any more. A refusal is an error.

        `tolerates_refusals`: of those that are left when others are lost, since they may follow from that.
        """
        members = self._open_members()
        outcomes = await self._outcomes(members, work)
        lost = {e: o for e, o in outcomes if o is not None and not isinstance(o, ControlRefused)}
        refusals = [o for _, o in outcomes if isinstance(o, ControlRefused)]
        may_pass = all(error.may_pass for error in refusals)
        self._members = [engine for engine in members if engine not in lost]
        for engine, error in lost.items():
            self._recovery.lost(engine, error)
            await self._fleet.set_aside(engine)
        is_hopeless = not self._members and not may_be_none
        if (lost or (refusals and may_pass)) and (is_hopeless or (refusals and tolerates_refusals)):
            raise EnginesLost("; ".join(map(str, [*lost.values(), *refusals])))
        if refusals:
            raise ControlRefused("; ".join(map(str, refusals)))

    async def _outcomes(
        self, engines: Iterable[Engine], work: Callable[[Engine], Awaitable[object]]
    ) -> list[tuple[Engine, ControlFailed | None]]:
        async def one(engine: Engine) -> tuple[Engine, ControlFailed | None]:
            try:
                await work(engine)
            except ControlFailed as error:
                return engine, error
            return engine, None

        return await asyncio.gather(*map(one, engines))


async def _check_holds(engine: Engine, label: str) -> None:
    found = await control.version_of(engine)
    if found != label:
        raise ControlFailed(
            f"{engine.url} must hold the weights labelled {label!r} to take a part of new ones, found "
            f"{found!r}: it waits for a push of all weights"
        )


def _num_workers(engine: Engine) -> int:
    """Processes that hold a part of its weights each."""
    return 1 if engine.standing.info is None else engine.standing.info.num_workers
