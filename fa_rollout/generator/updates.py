"""Weight updates as the engines see them: pause, load, label, go on.

In: the hub's orders, one after the other. Out: `EnginesPaused`, `WeightsPublished` or `UpdateFailed`.

| who waits | for | at most |
|---|---|---|
| requests that would leave | the engines to go on | the pause's lease |
| the pause, where engines tell no version spans | our own requests to come back aborted | `settle_s` |
| a stage of a stream | every engine to take it | the pool's deadlines; an order to go on ends it |
| the hub | load and label on every engine | the pool's deadlines |

Invariant: engines go on after every order, whatever fails, and at the latest when the lease ends. No token is
labelled with a version before every engine has confirmed it. Engines whose weights a stream has replaced in
part are taken out when it is not published. Nothing here waits for the ring, and no request
that is not ours is aborted.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from fa_rollout.client.errors import ClientError, ControlFailed, ControlRefused
from fa_rollout.client.pool import EnginePool
from fa_rollout.config import ConfigError
from fa_rollout.generator.gate import Gate
from fa_rollout.generator.requester import Requester
from fa_rollout.generator.stages import StreamStages, may_retry
from fa_rollout.generator.versions import VersionBook
from trainer_hook.messages import (
    ContinueEngines,
    EnginesPaused,
    EngineStage,
    Message,
    PauseEngines,
    PublishWeights,
    StageDone,
    StageFailed,
    UpdateFailed,
    Warned,
    WeightsPublished,
)

logger = logging.getLogger(__name__)

RECOVERY_S = 30.0
"""Engines that are all lost in an update may take so long to come back."""
RECOVERY_RETRY_S = 0.5
HOLD = "update"
ENGINE_MODE = "retract"
"""The engines' own `abort` mode would end everybody's requests, so we end ours ourselves before the pause."""


def pause_mode(configured: str, *, has_spans: bool) -> str:
    """How the engines stand still.

    Raises:
        ConfigError: a mode that would mix versions in one answer, on engines that tell no spans.
    """
    if configured == "auto":
        return "retract" if has_spans else "abort"
    if configured != "abort" and not has_spans:
        raise ConfigError(
            f'engine.pause_mode = "{configured}" mixes weight versions in one answer, and an engine here '
            'does not tell which tokens are whose (SGLang does from 0.5.19 on); use "auto" or "abort"'
        )
    return configured


class EngineUpdates:
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
        """
        Args:
            gates: closed while the engines stand still.
            mode: as `pause_mode` says.
            settle_s: longest wait for our aborted requests to come back.
        """
        self._pool = pool
        self._requester = requester
        self._book = book
        self._gates = gates
        self._mode = mode
        self._settle_s = settle_s
        self._send = send
        self._orders: asyncio.Queue[Message] = asyncio.Queue()
        self._paused_s: float | None = None
        """When the engines began to stand still."""
        self._lease_ends_s: float | None = None
        self._stages = StreamStages(pool, book)

    def order(self, message: PauseEngines | EngineStage | PublishWeights | ContinueEngines) -> None:
        """Take an order; it is carried out after those before it."""
        if isinstance(message, ContinueEngines):
            self._stages.interrupt()
        self._orders.put_nowait(message)

    async def run(self) -> None:
        """Carry orders out until cancelled."""
        while True:
            try:
                async with asyncio.timeout_at(self._lease_ends_s):
                    message = await self._orders.get()
            except TimeoutError:
                self._send(Warned(text="the trainer paused the engines and did not come back: they go on"))
                message = ContinueEngines()
            try:
                await self._carry_out(message)
            except ClientError as error:
                self._book.withdraw()
                self._send(UpdateFailed(text=f"{type(error).__name__}: {error}"))

    async def _carry_out(self, message: Message) -> None:
        match message:
            case PauseEngines():
                await self._pause()
                self._lease_ends_s = asyncio.get_running_loop().time() + message.lease_s
                self._send(EnginesPaused())
            case EngineStage():
                await self._carry_on(message)
            case PublishWeights():
                await self._publish(message)
            case ContinueEngines():
                self._stages.interrupted()
                self._book.withdraw()
                await self._continue()

    # --- streams ----------------------------------------------------------------------------------

    async def _carry_on(self, message: EngineStage) -> None:
        """A step of a stream; failures are the trainer's to handle, who may begin anew."""
        self._lease_ends_s = None
        try:
            await self._pause(may_be_none=True)
            value = await self._stages.take(message, self._engine_mode)
        except ClientError as error:
            text = f"{type(error).__name__}: {error}"
            self._send(StageFailed(number=message.number, text=text, may_retry=may_retry(error)))
        else:
            self._send(StageDone(number=message.number, value=value))
        self._lease_ends_s = asyncio.get_running_loop().time() + message.lease_s

    # --- publication ------------------------------------------------------------------------------

    async def _publish(self, message: PublishWeights) -> None:
        """Publish, again if all engines are lost in the middle: one may be on its way to its next life."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + RECOVERY_S
        while True:
            try:
                await self._publish_once(message)
                return
            except ControlRefused:
                raise
            except ControlFailed as error:
                if message.is_streamed or loop.time() > deadline_s:
                    raise
                logger.warning("event=publish_again version=%d error=%s", message.version, error)
            self._book.withdraw()
            await asyncio.sleep(RECOVERY_RETRY_S)

    async def _publish_once(self, message: PublishWeights) -> None:
        try:
            await self._pause(may_be_none=message.is_streamed)
            self._book.announce(message.lineage, message.version)
            label = self._book.label(message.version)
            if message.is_streamed:
                await self._pool.streams.confirm(label)
            elif message.path is None:
                await self._pool.set_version_label(label)
            else:
                base = self._book.label(message.base)
                await self._pool.update_weights_from_disk(
                    message.path, label, changed=message.changed, base=base
                )
                await self._pool.streams.supersede()
            self._book.confirm(message.version)
        finally:
            bubble_s = await self._continue()
        logger.info("event=weights_published version=%d bubble_s=%.3f", message.version, bubble_s)
        self._send(WeightsPublished(version=message.version, bubble_s=bubble_s))

    async def _pause(self, *, may_be_none: bool = False) -> None:
        """Engines stand still when this returns; harmless when they do.

        `may_be_none`: those that are lost now may still come to a stream.
        """
        if self._paused_s is not None:
            return
        for gate in self._gates:
            gate.hold(HOLD)
        self._paused_s = time.monotonic()
        try:
            if self._mode == "abort":
                await self._settle()
            await self._pool.pause(self._engine_mode, may_be_none=may_be_none)
        except BaseException:
            self._open()
            raise

    @property
    def _engine_mode(self) -> str:
        return ENGINE_MODE if self._mode == "abort" else self._mode

    async def _settle(self) -> None:
        """Abort our own requests and wait for them to come back.

        One that does not come back in time is of an unknown version: the label at its end will not be the one
        it left under.
        """
        try:
            async with asyncio.timeout(self._settle_s):
                await self._requester.abort_all()
                await self._requester.settled()
        except TimeoutError:
            logger.warning("event=settle_timed_out num_requests=%d", self._requester.num_under_way)

    async def _continue(self) -> float:
        """Engines go on; how long they stood still. One that does not is left to the pool's probes."""
        started_s = self._paused_s
        self._lease_ends_s = None
        await self._pool.streams.abandon(self._book.label(self._book.published))
        if started_s is None:
            return 0.0
        try:
            await self._pool.continue_()
        except ClientError as error:
            self._send(Warned(text=f"an engine did not go on after its pause: {error}"))
        finally:
            self._open()
        return time.monotonic() - started_s

    def _open(self) -> None:
        self._paused_s = None
        for gate in self._gates:
            gate.release(HOLD)
