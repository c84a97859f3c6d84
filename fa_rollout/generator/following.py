"""Weight updates of engines that another node's run leads: this one only hears of them.

In: the hub's orders, one after the other. Out: `EnginesPaused`, `WeightsPublished` or `UpdateFailed`.

| order | engines that tell version spans | others |
|---|---|---|
| pause | new labels are believed from now on | besides, our requests are aborted, and none leaves |
| publish | every engine must tell the new label | the same; requests leave again |

Invariant: nothing here pauses an engine, gives it weights or a label, or continues it. No token is labelled
with a version before the leader has seen every engine confirm it.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable

from fa_rollout.client.errors import ClientError
from fa_rollout.client.pool import EnginePool
from fa_rollout.config import Config
from fa_rollout.generator.gate import Gate
from fa_rollout.generator.requester import Requester
from fa_rollout.generator.versions import VersionBook
from trainer_hook.messages import (
    ContinueEngines,
    EnginesPaused,
    EngineStage,
    Message,
    PauseEngines,
    PublishWeights,
    UpdateFailed,
    Warned,
    WeightsPublished,
)

logger = logging.getLogger(__name__)

HOLD = "update"
LABEL_WAIT_S = 30.0
"""An engine that the leader lost in an update may take so long to come back with the new label."""
_LOOK_S = 0.2


def follows(config: Config) -> bool:
    """Whether another node's run gives the engines their weights."""
    return config.engine.shared and config.data.shard > 0


class FollowedUpdates:
    """Carries the hub's orders out, one at a time."""

    def __init__(
        self,
        pool: EnginePool,
        *,
        requester: Requester,
        book: VersionBook,
        gates: tuple[Gate, ...],
        mode: str,
        settle_s: float,
        send: Callable[[Message], None],
    ) -> None:
        """Arguments as `EngineUpdates` has them."""
        self._pool, self._requester, self._book = pool, requester, book
        self._gates, self._mode, self._settle_s, self._send = gates, mode, settle_s, send
        self._orders: asyncio.Queue[Message] = asyncio.Queue()
        self._held_s: float | None = None
        """When the update began, for us."""
        self._lease_ends_s: float | None = None

    def order(self, message: PauseEngines | EngineStage | PublishWeights | ContinueEngines) -> None:
        """Take an order; it is carried out after those before it."""
        self._orders.put_nowait(message)

    async def run(self) -> None:
        """Carry orders out until cancelled."""
        while True:
            try:
                async with asyncio.timeout_at(self._lease_ends_s):
                    message = await self._orders.get()
            except TimeoutError:
                self._send(
                    Warned(text="the trainer began an update and did not come back: requests leave again")
                )
                message = ContinueEngines()
            try:
                await self._carry_out(message)
            except ClientError as error:
                self._end()
                self._send(UpdateFailed(text=f"{type(error).__name__}: {error}"))

    async def _carry_out(self, message: Message) -> None:
        match message:
            case PauseEngines():
                await self._begin()
                self._lease_ends_s = asyncio.get_running_loop().time() + message.lease_s
                self._send(EnginesPaused())
            case PublishWeights():
                await self._take_over(message)
            case ContinueEngines():
                self._end()
            case EngineStage():
                logger.warning("event=stage_ignored: streams go through the run that leads")

    async def _begin(self) -> None:
        """The leader is about to change the weights."""
        if self._held_s is not None:
            return
        self._held_s = time.monotonic()
        self._book.announced = sys.maxsize  # its number is told with the publication
        if self._mode != "abort":
            return
        for gate in self._gates:
            gate.hold(HOLD)
        try:
            async with asyncio.timeout(self._settle_s):
                await self._requester.abort_all()
                await self._requester.settled()
        except TimeoutError:
            logger.warning("event=settle_timed_out num_requests=%d", self._requester.num_under_way)

    async def _take_over(self, message: PublishWeights) -> None:
        """Every engine has the version, says the leader; see that it tells so."""
        self._book.announce(message.lineage, message.version)
        label = self._book.label(message.version)
        deadline_s = asyncio.get_running_loop().time() + LABEL_WAIT_S
        while found := await self._others(label):
            if asyncio.get_running_loop().time() > deadline_s:
                # What such an engine samples is of an unknown version, and so never current.
                self._send(Warned(text=f"engines must tell {label!r} after the update, found {found}"))
                break
            await asyncio.sleep(_LOOK_S)
        self._book.confirm(message.version)
        held_s = 0.0 if self._held_s is None else time.monotonic() - self._held_s
        self._end()
        self._send(
            WeightsPublished(version=message.version, bubble_s=held_s if self._mode == "abort" else 0.0)
        )

    async def _others(self, label: str) -> dict[str, str | None]:
        """Engines that tell another label, or cannot be asked."""
        try:
            versions = await self._pool.versions()
        except ClientError as error:
            return {"unknown": str(error)}
        return {url: found for url, found in versions.items() if found != label}

    def _end(self) -> None:
        self._book.withdraw()
        self._held_s = self._lease_ends_s = None
        for gate in self._gates:
            gate.release(HOLD)
