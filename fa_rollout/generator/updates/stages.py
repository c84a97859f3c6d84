"""The stages of a stream of weights, as the trainer orders them, one at a time.

In: stages. Out: their values, and engines that have taken them. Invariant: a stage ends when the trainer
leaves the update, however long engines would still wait for it.
"""

import asyncio
import logging

from fa_rollout.client.base.errors import ControlFailed, ControlRefused
from fa_rollout.client.fleet.weight_stream import EnginesLost
from fa_rollout.client.pool import EnginePool
from fa_rollout.generator.base.patience import outlasting_losses
from fa_rollout.generator.turns.versions import VersionBook
from trainer_hook.messages import (
    Audience,
    EngineStage,
    JoinGroup,
    OpenStream,
    SealStream,
    TakeBroadcast,
    TakeTensors,
)

logger = logging.getLogger(__name__)


class StreamStages:
    """Carries stages out."""

    def __init__(self, pool: EnginePool, book: VersionBook) -> None:
        self._pool = pool
        self._book = book
        self._interrupt = asyncio.Event()

    def interrupt(self) -> None:
        """The trainer has left the update: end the stage that is under way."""
        self._interrupt.set()

    def interrupted(self) -> None:
        """It is known now."""
        self._interrupt.clear()

    async def take(self, message: EngineStage, mode: str) -> Audience | None:
        """Have every engine take a stage; of an opening, who takes part. `mode`: in which engines are paused.

        Raises:
            ClientError: they did not; `may_retry` says whether to begin anew.
        """
        interrupt = asyncio.create_task(self._interrupt.wait())
        work = asyncio.create_task(self._take(message, mode))
        try:
            await asyncio.wait((work, interrupt), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise EnginesLost("the trainer left the update in the middle of a stream")
            return work.result()
        finally:
            interrupt.cancel()
            work.cancel()
            await asyncio.gather(interrupt, work, return_exceptions=True)

    async def _take(self, message: EngineStage, mode: str) -> Audience | None:
        streams, stage = self._pool.streams, message.stage
        match stage:
            case OpenStream():
                return await self._opened(stage, mode)
            case JoinGroup():
                await streams.join_group(stage)
            case TakeTensors():
                await streams.take_tensors(stage.path)
            case TakeBroadcast():
                await streams.take_broadcast(stage)
            case SealStream():
                self._book.announce(message.lineage, message.version)
                await streams.seal(self._book.label(message.version), stage.probes)
        return None

    async def _opened(self, stage: OpenStream, mode: str) -> Audience:
        """Open, also if all engines are lost now: one may be on its way to its next life."""
        base = self._book.label(self._book.published) if stage.partial else None
        return await outlasting_losses(
            lambda: self._pool.streams.open(mode, base=base),
            lambda error, is_news: logger.log(
                logging.WARNING if is_news else logging.INFO, "event=stream_waits error=%s", error
            ),
            self._pool.policy.unavailable_timeout_s,
        )


def may_retry(error: Exception) -> bool:
    """Whether the stream may be begun anew: engines were lost, none has refused."""
    return isinstance(error, ControlFailed) and not isinstance(error, ControlRefused)
