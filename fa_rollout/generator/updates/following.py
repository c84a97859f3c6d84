"""Weight updates of engines that another node's run leads: this one only hears of them.

In: the hub's orders, one after the other. Out: `EnginesPaused`, `WeightsPublished` or `UpdateFailed`.

| order | engines that tell version spans | others |
|---|---|---|
| pause | new labels are believed from now on | besides, our requests are aborted, and none leaves |
| publish | engines that tell the new label get requests | the same; requests leave again |
| go on | engines that tell the old label get requests | the same |

Invariant: nothing here pauses an engine, gives it weights or a label, or continues it. No token is labelled
with a version before the leader has seen every engine confirm it. Between two updates no engine gets requests
that tells another label than the published one: it is the leader's to bring up.
"""

import asyncio
import logging
import sys
import time
from contextlib import suppress

from fa_rollout.client.base.errors import ControlFailed
from fa_rollout.config import Config
from fa_rollout.generator.updates.orders import UpdateOrders
from trainer_hook.messages import (
    ContinueEngines,
    EnginesPaused,
    EngineStage,
    Message,
    PauseEngines,
    PublishWeights,
    Warned,
    WeightsPublished,
)

logger = logging.getLogger(__name__)

LABEL_WAIT_S = 30.0
"""An engine that the leader lost in an update may take so long to come back with the new label."""
_LOOK_S = 0.2


def follows(config: Config) -> bool:
    """Whether another node's run gives the engines their weights."""
    return config.engine.shared and config.data.shard > 0


class FollowedUpdates(UpdateOrders):
    """Carries the hub's orders out, one at a time."""

    lease_over = "the trainer began an update and did not come back: requests leave again"
    _held_s: float | None = None
    """When the update began, for us."""

    async def _carry_out(self, message: Message) -> None:
        match message:
            case PauseEngines():
                await self._begin()
                self._lease(message.lease_s)
                self._send(EnginesPaused())
            case PublishWeights():
                await self._take_over(message)
            case ContinueEngines():
                await self._go_on()
            case EngineStage():
                logger.warning("event=stage_ignored: streams go through the run that leads")

    def _failed(self) -> None:
        self.order(ContinueEngines())

    async def _begin(self) -> None:
        """The leader is about to change the weights."""
        if self._held_s is not None:
            return
        self._held_s = time.monotonic()
        self._book.announced = sys.maxsize  # its number is told with the publication
        self._pool.weights.expect_change()
        if self._mode != "abort":
            return
        self._hold()
        await self._settle()

    async def _take_over(self, message: PublishWeights) -> None:
        """Every engine has the version, says the leader; those that tell so get requests."""
        self._book.announce(message.lineage, message.version)
        label = self._book.label(message.version)
        if not await self._is_told(label):
            self._send(Warned(text=f"an engine must tell {label!r} after the update, found none"))
        self._book.confirm(message.version)
        held_s = 0.0 if self._held_s is None else time.monotonic() - self._held_s
        self._end()
        self._send(
            WeightsPublished(version=message.version, bubble_s=held_s if self._mode == "abort" else 0.0)
        )

    async def _go_on(self) -> None:
        """No version came of it; what some engines may have of it is not current."""
        self._end()
        with suppress(ControlFailed):
            await self._pool.weights.changed()

    async def _is_told(self, label: str) -> bool:
        """Whether an engine comes to tell it in time; the others get no requests until they do."""
        deadline_s = asyncio.get_running_loop().time() + LABEL_WAIT_S
        while asyncio.get_running_loop().time() < deadline_s:
            with suppress(ControlFailed):
                if await self._pool.weights.changed(label):
                    return True
            await asyncio.sleep(_LOOK_S)
        return False

    def _end(self) -> None:
        self._book.withdraw()
        self._held_s = self._lease_ends_s = None
        self._release()
